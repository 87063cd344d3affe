//! Where things are on this machine, and how programs are run on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The repository's root folder.
pub(crate) fn repo() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// Cargo's target folder (`CARGO_TARGET_DIR` or `target/`).
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if !dir.is_empty() => {
            let dir = PathBuf::from(dir);
            if dir.is_absolute() {
                dir
            } else {
                repo().join(dir)
            }
        }
        _ => repo().join("target"),
    }
}

/// The user's home folder.
pub(crate) fn home() -> Result<PathBuf> {
    std::env::var_os("HOME")
        .filter(|h| !h.is_empty())
        .map(PathBuf::from)
        .ok_or_else(|| Error::other("$HOME is not set"))
}

/// `$XDG_CACHE_HOME/bantam`, by default `~/.cache/bantam`.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir),
        _ => home()?.join(".cache"),
    };
    Ok(base.join("bantam"))
}

/// The cargo that runs this command, or the one on the path.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(repo());
    command
}

/// Number of CPUs to use for builds.
pub(crate) fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Creates a folder and its parents.
pub(crate) fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::file("creating", path))
}

/// Reads a whole file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(Error::file("reading", path))
}

/// Writes a file so that a reader sees the old bytes or the new ones.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial_path(path);
    fs::write(&partial, bytes).map_err(Error::file("writing", &partial))?;
    fs::rename(&partial, path).map_err(Error::file("renaming", &partial))
}

/// Copies a file so that a reader sees the old bytes or the new ones.
pub(crate) fn copy_atomic(from: &Path, to: &Path) -> Result<()> {
    let partial = partial_path(to);
    fs::copy(from, &partial).map_err(Error::file("copying", from))?;
    fs::rename(&partial, to).map_err(Error::file("renaming", &partial))
}

/// The name a file has while it is being written.
pub(crate) fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    path.with_file_name(name)
}

/// Removes a folder if it is there.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::File {
            doing: "removing",
            path: path.to_path_buf(),
            source: e,
        }),
        _ => Ok(()),
    }
}

/// SHA-256 as lower-case hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes as lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs a program that talks to the terminal itself.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(start_error(command))?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Program {
            program: describe(command),
            status: status.to_string(),
            tail: String::new(),
        })
    }
}

/// Runs a program silently; its output is shown only if it fails.
pub(crate) fn run_quiet(command: &mut Command) -> Result<()> {
    capture(command).map(drop)
}

/// Runs a program and returns its standard output.
pub(crate) fn capture(command: &mut Command) -> Result<Vec<u8>> {
    let out = command
        .stdin(Stdio::null())
        .output()
        .map_err(start_error(command))?;
    if out.status.success() {
        return Ok(out.stdout);
    }
    let mut said = String::from_utf8_lossy(&out.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&out.stderr));
    Err(Error::Program {
        program: describe(command),
        status: out.status.to_string(),
        tail: last_lines(&said, 40),
    })
}

/// First line of a program's standard output.
pub(crate) fn first_line(command: &mut Command) -> Result<String> {
    let out = capture(command)?;
    let text = String::from_utf8_lossy(&out);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Whether a program of this name is on the path.
pub(crate) fn has_program(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).is_file()))
}

/// Compiles one of the repository's plugins of QEMU into `dir`.
pub(crate) fn build_plugin(source: &str, dir: &Path) -> Result<PathBuf> {
    let source = repo().join(source);
    let name = source.file_stem().unwrap_or_default();
    let plugin = dir.join(name).with_extension("so");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&plugin, &source]);
    run_quiet(&mut cc)?;
    Ok(plugin)
}

/// The error for a program that does not start.
pub(crate) fn start_error(command: &Command) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let program = command.get_program().to_string_lossy().into_owned();
    move |source| Error::Start { program, source }
}

/// A program with its first arguments, for messages.
pub(crate) fn describe(command: &Command) -> String {
    let name = Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program())
        .to_string_lossy()
        .into_owned();
    let args = command.get_args().take(6).map(|a| a.to_string_lossy());
    std::iter::once(name.into())
        .chain(args)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The last `n` lines of a text.
pub(crate) fn last_lines(text: &str, n: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(n)..].join("\n")
}
