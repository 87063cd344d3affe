//! `bantam cp`.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bantam::{Copied, CopyOptions, MachineName};

use super::args::CpArgs;
use super::command::output_failure;
use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;
use crate::show::{raw_stdout, say};

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// A path here.
    Here(PathBuf),
    /// A path in a machine.
    There(MachineName, PathBuf),
    /// A tar archive on standard input or output.
    Stream,
}

impl End {
    /// `NAME:/PATH` is in a machine, `-` a stream; anything else is here. A file here whose name
    /// looks like the former is `./NAME:/PATH`.
    fn parse(text: &OsStr) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        let bytes = text.as_bytes();
        let colon = bytes.iter().position(|&byte| byte == b':');
        let there = colon.and_then(|at| {
            let name = MachineName::parse(std::str::from_utf8(&bytes[..at]).ok()?).ok()?;
            let path = Path::new(OsStr::from_bytes(&bytes[at + 1..]));
            path.is_absolute().then(|| (name, path.to_path_buf()))
        });
        match there {
            Some((name, path)) => Self::There(name, path),
            None => Self::Here(text.into()),
        }
    }
}

pub(super) fn cp(global: &Global, args: &CpArgs) -> Outcome {
    let options = CopyOptions {
        owners: args.archive,
        follow_link: args.follow_link,
    };
    let ends = (End::parse(&args.source), End::parse(&args.destination));
    check_streams(&ends, io::stdin().is_terminal(), io::stdout().is_terminal())?;
    let machines = global.machines()?;
    let copied = match ends {
        (End::Here(from), End::There(name, to)) => {
            machines.connect(&name)?.copy_in(from, to, &options)?
        }
        (End::There(name, from), End::Here(to)) => machines
            .connect(&name)?
            .copy_out(from, to, &options)
            .map_err(output_failure)?,
        (End::Stream, End::There(name, to)) => machines
            .connect(&name)?
            .copy_in_tar(&mut io::stdin().lock(), to)?,
        (End::There(name, from), End::Stream) => machines
            .connect(&name)?
            .copy_out_tar(from, &mut raw_stdout()?, &options)
            .map_err(output_failure)?,
        _ => {
            return Err(Failure::Usage(
                "one of SRC and DST must be NAME:/PATH, in a machine, and the other a path here \
                 or -"
                    .into(),
            ));
        }
    };
    report(global, copied);
    Ok(0)
}

/// An archive is no reading for a terminal, least of all one that a guest made, and nobody types
/// one.
fn check_streams(
    ends: &(End, End),
    stdin_is_terminal: bool,
    stdout_is_terminal: bool,
) -> Result<(), Failure> {
    match ends {
        (End::Stream, _) if stdin_is_terminal => Err(Failure::Usage(
            "standard input is a terminal: pipe an archive in, or name a path".into(),
        )),
        (_, End::Stream) if stdout_is_terminal => Err(Failure::Usage(
            "standard output is a terminal: send the archive to a file or a pipe, or name a path"
                .into(),
        )),
        _ => Ok(()),
    }
}

fn report(global: &Global, copied: Copied) {
    if copied.skipped > 0 {
        say(
            global,
            &format!("note: {} sockets and devices were left out", copied.skipped),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_archive_comes_from_or_goes_to_a_terminal() {
        let there = || End::parse("dev:/x".as_ref());
        let out = (there(), End::Stream);
        assert_eq!(check_streams(&out, true, true).unwrap_err().exit_code(), 2);
        assert!(check_streams(&out, true, false).is_ok());
        let into = (End::Stream, there());
        assert_eq!(check_streams(&into, true, true).unwrap_err().exit_code(), 2);
        assert!(check_streams(&into, false, true).is_ok());
        let path = (there(), End::Here("y".into()));
        assert!(check_streams(&path, true, true).is_ok());
    }

    #[test]
    fn only_a_name_and_an_absolute_path_are_in_a_machine() {
        let there = |text: &str| matches!(End::parse(text.as_ref()), End::There(..));
        assert!(there("dev:/etc/hosts"));
        assert!(there("dev:/"));
        for here in [
            "./dev:/x", "/dev:/x", "dev", "dev:x", ":/x", "a b:/x", "dev:",
        ] {
            assert_eq!(End::parse(here.as_ref()), End::Here(here.into()), "{here}");
        }
        assert_eq!(End::parse("-".as_ref()), End::Stream);
    }
}
