//! Running a command in a machine: its context, its streams, its result.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

use bantam::{ArchiveError, Exec, Output, Status};

use super::args::{CommandArgs, ContextArgs, OutputArgs};
use crate::failure::Failure;
use crate::show::raw_stdout;
use crate::signals::Forwarding;
use crate::terminal;

/// What was set for a command, checked before a machine is started for it.
pub(super) struct Context {
    env: Vec<(OsString, OsString)>,
    workdir: Option<OsString>,
    user: Option<String>,
}

impl Context {
    pub(super) fn new(args: &ContextArgs) -> Result<Self, Failure> {
        Ok(Self {
            env: environment(&args.env)?,
            workdir: args.workdir.clone(),
            user: args.user.clone(),
        })
    }

    pub(super) fn apply(self, mut exec: Exec) -> Exec {
        for (name, value) in self.env {
            exec = exec.env(name, value);
        }
        if let Some(dir) = self.workdir {
            exec = exec.workdir(dir);
        }
        if let Some(user) = self.user {
            exec = exec.user(user);
        }
        exec
    }
}

/// What came of a command.
pub(super) enum Done {
    /// Its output was passed on.
    Passed(Status),
    /// Its output is to be shown as JSON.
    Kept(Output),
}

impl Done {
    pub(super) fn status(&self) -> Status {
        match self {
            Self::Passed(status) => *status,
            Self::Kept(output) => output.status,
        }
    }
}

/// Refuses what cannot work, before a machine is started for it.
pub(super) fn check(args: &CommandArgs) -> Result<(), Failure> {
    if args.tty { terminal::check() } else { Ok(()) }
}

/// Runs a command as the arguments say.
pub(super) fn perform(
    mut exec: Exec,
    args: &CommandArgs,
    output: &OutputArgs,
) -> Result<Done, Failure> {
    if let Some(timeout) = args.timeout {
        exec = exec.timeout(timeout);
    }
    if args.tty {
        return terminal::run(exec, args.interactive).map(Done::Passed);
    }
    // Had before the command runs: it fails where there are no descriptors left.
    let mut stdout = raw_stdout()?;
    if args.interactive {
        exec = exec.stdin_reader(io::stdin());
    }
    let running = exec.max_output(output.max_output).start()?;
    let _forwarding = Forwarding::start(running.handle()).map_err(|source| {
        Failure::Library(bantam::Error::Io {
            what: "cannot watch for signals",
            source,
        })
    })?;
    if output.json {
        return Ok(Done::Kept(running.output()?));
    }
    running
        .pipe(&mut stdout, &mut io::stderr())
        .map(|finished| Done::Passed(finished.status))
        .map_err(output_failure)
}

/// A closed standard output is the reader's choice, not an error to explain.
pub(super) fn output_failure(error: bantam::Error) -> Failure {
    match error {
        bantam::Error::Io { source, .. }
        | bantam::Error::Archive(ArchiveError::File { source, .. })
            if source.kind() == io::ErrorKind::BrokenPipe =>
        {
            Failure::Output(source)
        }
        other => other.into(),
    }
}

/// `NAME=value`, or `NAME` for the value it has here; a `NAME` that is not set here is left out.
pub(super) fn environment(entries: &[OsString]) -> Result<Vec<(OsString, OsString)>, Failure> {
    let mut env = Vec::new();
    for entry in entries {
        let bytes = entry.as_bytes();
        let (name, value) = match bytes.iter().position(|&byte| byte == b'=') {
            Some(at) => {
                let value = OsStr::from_bytes(&bytes[at + 1..]);
                (OsStr::from_bytes(&bytes[..at]), Some(value.to_owned()))
            }
            None => (entry.as_os_str(), std::env::var_os(entry)),
        };
        if name.is_empty() {
            return Err(Failure::Usage(format!(
                "-e '{}' names no variable: use NAME=value",
                entry.display()
            )));
        }
        env.extend(value.map(|value| (name.to_owned(), value)));
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_without_a_value_is_taken_from_here() {
        let path = std::env::var_os("PATH").unwrap();
        let env = environment(&["PATH".into(), "A=b=c".into(), "E=".into()]).unwrap();
        assert_eq!(
            env,
            [
                ("PATH".into(), path),
                ("A".into(), "b=c".into()),
                ("E".into(), "".into())
            ]
        );
        assert_eq!(environment(&["BANTAM_NOT_SET_HERE".into()]).unwrap(), []);
        assert!(environment(&["=x".into()]).is_err());
    }
}
