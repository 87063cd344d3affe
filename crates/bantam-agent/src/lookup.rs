//! Which file a command name means, and why it could not be executed.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bantam_protocol::{StartFailed, StartFailedKind, clip_text};
use nix::errno::Errno;

/// The `PATH` of a command whose environment has none, as container engines set it.
pub(crate) const DEFAULT_PATH: &[u8] =
    b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most bytes of a program that are read to name its interpreter.
const MAX_HEAD_LEN: u64 = 4096;

/// The value of `name` in a list of `NAME=value` entries.
pub(crate) fn variable<'a>(env: &'a [Vec<u8>], name: &str) -> Option<&'a [u8]> {
    env.iter().find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?;
        value.strip_prefix(b"=")
    })
}

/// The paths to try for `command`, in order: itself if it has a slash, else one in
/// each directory of `path`. An empty directory means the working directory.
pub(crate) fn candidates(command: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if command.is_empty() {
        return Vec::new();
    }
    if command.contains(&b'/') {
        return vec![command.to_vec()];
    }
    path.split(|byte| *byte == b':')
        .map(|dir| {
            let dir = if dir.is_empty() { b"." } else { dir };
            let mut candidate = Vec::with_capacity(dir.len() + 1 + command.len());
            candidate.extend_from_slice(dir);
            candidate.push(b'/');
            candidate.extend_from_slice(command);
            candidate
        })
        .collect()
}

/// Says why none of the candidates for `command` could be executed, given the
/// error that decided it and the working directory.
pub(crate) fn explain(
    command: &[u8],
    candidates: &[Vec<u8>],
    cwd: &Path,
    error: Errno,
) -> StartFailed {
    let shown = String::from_utf8_lossy(command).into_owned();
    let found = candidates
        .iter()
        .map(|candidate| cwd.join(std::ffi::OsStr::from_bytes(candidate)))
        .find(|path| path.symlink_metadata().is_ok());
    let (kind, message) = match (error, found) {
        (Errno::ENOENT | Errno::ENOTDIR, None) if command.contains(&b'/') => (
            StartFailedKind::NotFound,
            format!("{shown}: no such file or directory"),
        ),
        (Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG, None) => (
            StartFailedKind::NotFound,
            format!("{shown}: command not found in PATH"),
        ),
        (Errno::ENOENT | Errno::ENOTDIR, Some(path)) => {
            (StartFailedKind::NotFound, without_interpreter(&path))
        }
        (Errno::EACCES, Some(path)) if path.is_dir() => (
            StartFailedKind::NotExecutable,
            format!("{}: is a directory", path.display()),
        ),
        (Errno::EACCES, Some(path)) => (
            StartFailedKind::NotExecutable,
            format!("{}: permission denied", path.display()),
        ),
        (Errno::ENOEXEC, Some(path)) => (
            StartFailedKind::NotExecutable,
            format!(
                "{}: exec format error: neither a program for this processor nor a script \
                 that begins with #!",
                path.display()
            ),
        ),
        (Errno::E2BIG, _) => (
            StartFailedKind::NotExecutable,
            format!("{shown}: the arguments and the environment are too long"),
        ),
        (Errno::ENOMEM | Errno::EAGAIN | Errno::EMFILE | Errno::ENFILE, _) => (
            StartFailedKind::Internal,
            format!("{shown}: {}", error.desc()),
        ),
        (_, _) => (
            StartFailedKind::NotExecutable,
            format!("{shown}: {}", error.desc()),
        ),
    };
    StartFailed {
        kind,
        message: clip_text(message),
    }
}

/// `execve` says "no such file" of a file that exists when what it names to run it
/// does not exist.
fn without_interpreter(path: &Path) -> String {
    let mut head = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MAX_HEAD_LEN).read_to_end(&mut head);
    }
    let shown = path.display();
    match interpreter(&head) {
        Some(interpreter) => format!(
            "{shown}: its interpreter {} is not in the image",
            interpreter.display()
        ),
        None if path.exists() => format!("{shown}: its interpreter is not in the image"),
        None => format!("{shown}: the symbolic link leads nowhere"),
    }
}

/// What a script (`#!`) or a dynamic 64-bit little-endian ELF file (PT_INTERP)
/// names as its interpreter, if that is in `head`.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let name = match head.strip_prefix(b"#!") {
        Some(line) => line
            .split(|byte| *byte == b'\n')
            .next()?
            .trim_ascii()
            .split(u8::is_ascii_whitespace)
            .next()?,
        None => elf_interpreter(head)?,
    };
    (!name.is_empty()).then(|| PathBuf::from(std::ffi::OsStr::from_bytes(name)))
}

fn elf_interpreter(head: &[u8]) -> Option<&[u8]> {
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = field(head, 32, 8)?;
    let entry_size = field(head, 54, 2)?;
    let entries = field(head, 56, 2)?;
    let entry = (0..entries).find_map(|index| {
        let start = table.checked_add(index.checked_mul(entry_size)?)?;
        let entry = head.get(start..start.checked_add(56)?)?;
        entry.starts_with(&PT_INTERP).then_some(entry)
    })?;
    let offset = field(entry, 8, 8)?;
    let size = field(entry, 32, 8)?;
    let name = head.get(offset..offset.checked_add(size)?)?;
    name.split(|byte| *byte == 0).next()
}

/// A little-endian number of `len` (at most 8) bytes.
fn field(bytes: &[u8], offset: usize, len: usize) -> Option<usize> {
    let field = bytes.get(offset..offset.checked_add(len)?)?;
    let value = field.iter().rev().try_fold(0u64, |value, byte| {
        Some(value.checked_shl(8)? | u64::from(*byte))
    })?;
    usize::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn strings(list: Vec<Vec<u8>>) -> Vec<String> {
        list.into_iter()
            .map(|item| String::from_utf8(item).unwrap())
            .collect()
    }

    #[test]
    fn a_bare_name_is_tried_in_each_directory_of_path_in_order() {
        assert_eq!(
            strings(candidates(b"ls", b"/usr/bin:/bin")),
            ["/usr/bin/ls", "/bin/ls"]
        );
        assert_eq!(strings(candidates(b"ls", b"")), ["./ls"]);
        assert_eq!(strings(candidates(b"ls", b":/bin")), ["./ls", "/bin/ls"]);
    }

    #[test]
    fn a_name_with_a_slash_is_itself_and_an_empty_one_is_nothing() {
        assert_eq!(strings(candidates(b"./run", b"/bin")), ["./run"]);
        assert_eq!(strings(candidates(b"bin/run", b"/bin")), ["bin/run"]);
        assert!(candidates(b"", b"/bin").is_empty());
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let env = [
            b"PATHS=no".to_vec(),
            b"noequals".to_vec(),
            b"PATH=a=b".to_vec(),
        ];
        assert_eq!(variable(&env, "PATH"), Some(&b"a=b"[..]));
        assert_eq!(variable(&env, "noequals"), None);
        assert_eq!(variable(&env, "HOME"), None);
    }

    #[test]
    fn a_script_and_a_dynamic_program_name_their_interpreter() {
        let name = |head: &[u8]| interpreter(head).map(|path| path.display().to_string());
        assert_eq!(
            name(b"#! /usr/bin/env python\n"),
            Some("/usr/bin/env".into())
        );
        assert_eq!(name(b"#!/bin/bash"), Some("/bin/bash".into()));
        assert_eq!(name(b"#!\n"), None);
        assert_eq!(name(b"\x7fELF\x02\x01"), None);
        assert_eq!(name(b""), None);
        let mut elf = vec![0; 64 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 1;
        elf[64] = 3;
        elf[64 + 8] = 120;
        elf[64 + 32] = 18;
        assert_eq!(name(&elf), None, "the name lies outside what was read");
        elf.extend_from_slice(b"/lib/ld-musl.so.1\0");
        assert_eq!(name(&elf), Some("/lib/ld-musl.so.1".into()));
        elf[64 + 32..64 + 40].fill(0xff);
        assert_eq!(name(&elf), None, "an absurd size is no name");
    }

    #[test]
    fn each_failure_has_the_kind_a_shell_would_give_and_names_the_thing() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8], mode| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        };
        file("script", b"#!/no/such/shell -x\n", 0o755);
        file("plain", b"data", 0o644);
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        let table: [(&str, Errno, StartFailedKind, &str); 7] = [
            (
                "./script",
                Errno::ENOENT,
                StartFailedKind::NotFound,
                "/no/such/shell",
            ),
            (
                "./plain",
                Errno::EACCES,
                StartFailedKind::NotExecutable,
                "permission denied",
            ),
            (
                "./plain",
                Errno::ENOEXEC,
                StartFailedKind::NotExecutable,
                "exec format error",
            ),
            (
                "./folder",
                Errno::EACCES,
                StartFailedKind::NotExecutable,
                "is a directory",
            ),
            ("./none", Errno::ENOENT, StartFailedKind::NotFound, "./none"),
            (
                "bash",
                Errno::ENOENT,
                StartFailedKind::NotFound,
                "bash: command not found",
            ),
            (
                "./plain",
                Errno::ENOMEM,
                StartFailedKind::Internal,
                "./plain",
            ),
        ];
        for (command, errno, kind, text) in table {
            let tried = candidates(command.as_bytes(), b"/nowhere");
            let failure = explain(command.as_bytes(), &tried, dir.path(), errno);
            assert_eq!(failure.kind, kind, "{command} {errno}");
            assert!(failure.message.contains(text), "{}", failure.message);
        }
    }
}
