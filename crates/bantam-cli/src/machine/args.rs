//! The arguments of the commands about machines.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bantam::{EngineChoice, Exec, MachineBuilder, MachineName, Platform, PullPolicy};
use clap::{Args, Subcommand, ValueEnum};

use super::later::{Later, LaterArgs};
use super::network::{HostArgs, NetworkChangeArgs};
use crate::failure::Failure;

const EXIT_STATUS: &str = "\
Exit status: the command's own; 124 after --timeout, 126 not executable, 127 not found,
128+N killed by signal N, 125 bantam's own failure, 2 a mistake on the command line.";

#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum MachineCommand {
    /// Boot a one-off machine, run a command in it, remove the machine
    Run(Box<RunArgs>),
    /// Make a named machine, which keeps what it writes
    Create(Box<CreateArgs>),
    /// Start a named machine
    Start(StartArgs),
    /// Ask a machine to write everything back and power off
    Stop(StopArgs),
    /// Stop a machine and start it again
    Restart(StopArgs),
    /// Remove a machine with everything it wrote
    #[command(alias = "rm")]
    Delete(DeleteArgs),
    /// Run a command in a running machine
    Exec(ExecArgs),
    /// Open a shell in a running machine
    #[command(alias = "sh")]
    Shell(ShellArgs),
    /// List machines (with -q, their names only)
    #[command(alias = "list")]
    Ls(LsArgs),
    /// Show how a machine is
    Status(StatusArgs),
    /// Show what a machine and its process use
    Stats(StatusArgs),
    /// Show what a machine's workload wrote
    Logs(LogsArgs),
    /// Copy files between here and a running machine: NAME:/PATH is there, - a tar stream
    Cp(CpArgs),
    /// Show what a machine's network refused
    EgressEvents(EventsArgs),
    /// Change a machine: what its network may reach at once, the rest (ports too) when it is stopped
    Update(Box<UpdateArgs>),
    /// Print the directory in which a machine is kept
    DataDir(NamedArgs),
    #[command(flatten)]
    Later(Later),
}

impl MachineCommand {
    /// Whether its result is JSON.
    pub(crate) fn json(&self) -> bool {
        match self {
            Self::Run(args) => args.output.json,
            Self::Exec(args) => args.output.json,
            Self::Ls(args) => args.json,
            Self::Status(args) | Self::Stats(args) => args.json,
            Self::EgressEvents(args) => args.json,
            _ => false,
        }
    }
}

// Which machine.
#[derive(Debug, Args)]
pub(crate) struct NameArg {
    /// The machine; else $BANTAM_MACHINE_NAME, else 'default'
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

impl NameArg {
    pub(crate) fn resolve(&self) -> Result<MachineName, Failure> {
        match given_name(self.name.as_deref())? {
            Some(name) => Ok(name),
            None => Ok(MachineName::parse(MachineName::DEFAULT)?),
        }
    }
}

// Which machine, for what is better not done to the wrong one.
#[derive(Debug, Args)]
pub(crate) struct RequiredNameArg {
    /// The machine; else $BANTAM_MACHINE_NAME
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

impl RequiredNameArg {
    pub(crate) fn resolve(&self) -> Result<MachineName, Failure> {
        given_name(self.name.as_deref())?.ok_or_else(|| {
            Failure::Usage("which machine? Name it with --name or BANTAM_MACHINE_NAME".to_owned())
        })
    }
}

/// The machine that was named, on the command line or in the environment.
pub(crate) fn given_name(name: Option<&str>) -> Result<Option<MachineName>, Failure> {
    let variable = |name: &str| std::env::var(name).ok().filter(|name| !name.is_empty());
    name.map(str::to_owned)
        .or_else(|| variable("BANTAM_MACHINE_NAME"))
        .or_else(|| variable("SMOLVM_MACHINE_NAME"))
        .map(|name| MachineName::parse(&name).map_err(Failure::from))
        .transpose()
}

// How a command is run.
#[derive(Debug, Args)]
pub(crate) struct CommandArgs {
    /// Pass standard input to the command
    #[arg(short = 'i', long, help_heading = "Command")]
    pub(crate) interactive: bool,
    /// Run the command on a terminal, this one
    #[arg(short = 't', long, conflicts_with = "json", help_heading = "Command")]
    pub(crate) tty: bool,
    #[command(flatten)]
    pub(crate) context: ContextArgs,
    /// Kill the command after so long: 500ms, 90s, 2m; a plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Command")]
    pub(crate) timeout: Option<Duration>,
}

// What a command finds around it.
#[derive(Debug, Args)]
pub(crate) struct ContextArgs {
    /// Set a variable; NAME alone takes the value from here (repeatable)
    #[arg(
        short = 'e',
        long = "env",
        value_name = "NAME[=VALUE]",
        help_heading = "Command"
    )]
    pub(crate) env: Vec<OsString>,
    /// Working directory of the command
    #[arg(short = 'w', long, value_name = "DIR", help_heading = "Command")]
    pub(crate) workdir: Option<OsString>,
    /// User of the command: NAME, UID, NAME:GROUP or UID:GID
    #[arg(short = 'u', long, value_name = "USER", help_heading = "Command")]
    pub(crate) user: Option<String>,
}

// What the result looks like.
#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// One JSON object on standard output instead of the command's bytes; errors are JSON, too
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// With --json: keep at most so many bytes of each stream
    #[arg(long, value_name = "BYTES", default_value_t = Exec::MAX_OUTPUT, requires = "json",
        hide_default_value = true, help_heading = "Output")]
    pub(crate) max_output: u64,
    /// Show when each phase was reached
    #[arg(long, help_heading = "Output")]
    pub(crate) timings: bool,
}

// What a machine is made of.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Registry reference, ./archive.tar, layout or root directory, or - for standard input
    #[arg(short = 'I', long, value_name = "IMAGE")]
    pub(crate) image: String,
    /// Replace the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM", help_heading = "Command")]
    pub(crate) entrypoint: Option<OsString>,

    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = MachineBuilder::DEFAULT_CPUS, help_heading = "Machine")]
    pub(crate) cpus: u8,
    /// Memory in MiB
    #[arg(
        long,
        value_name = "MIB",
        value_parser = parse_mib,
        default_value_t = MachineBuilder::DEFAULT_MEMORY_MIB,
        help_heading = "Machine"
    )]
    pub(crate) mem: u32,
    #[command(flatten)]
    pub(crate) disk: DiskArgs,
    /// native, emulated or auto
    #[arg(
        long,
        value_name = "ENGINE",
        default_value = "auto",
        value_parser = |text: &str| text.parse::<EngineChoice>(),
        help_heading = "Machine"
    )]
    pub(crate) engine: EngineChoice,
    /// Guest kernel: an ELF image or a bzImage
    #[arg(long, value_name = "PATH", help_heading = "Machine")]
    pub(crate) kernel: Option<PathBuf>,
    /// Words appended to the guest kernel's command line
    #[arg(long, value_name = "WORDS", help_heading = "Machine")]
    pub(crate) kernel_args: Option<String>,

    /// Ask the registry if the image is missing from the store, always (a tag may have moved), or
    /// never
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "missing",
        help_heading = "Image"
    )]
    pub(crate) pull: Pull,
    /// Platform to choose from an image of several, such as linux/arm64
    #[arg(long, alias = "oci-platform", value_name = "OS/ARCH", value_parser = Platform::parse, help_heading = "Image")]
    pub(crate) platform: Option<Platform>,
}

// The size of a named machine's disk.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DiskArgs {
    /// Size of a named machine's disk in GiB; it takes no more than is written
    #[arg(long, value_name = "GIB", help_heading = "Machine")]
    pub(crate) storage: Option<u32>,
    /// The same; the larger of the two counts
    #[arg(long, value_name = "GIB", help_heading = "Machine")]
    pub(crate) overlay: Option<u32>,
}

impl DiskArgs {
    /// There is one disk, for all that a machine writes.
    pub(crate) fn gib(self) -> Option<u32> {
        self.storage.max(self.overlay)
    }
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_STATUS)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// The command; without one, the image's own
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
    /// Leave a named machine running with the command in it, and return
    #[arg(short, long, conflicts_with_all = ["json", "timings", "timeout"])]
    pub(crate) detach: bool,
    /// With --detach: remove the machine when the command ends
    #[arg(long, requires = "detach")]
    pub(crate) rm: bool,
    /// The guest's host name; with --detach, the machine
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// With --detach: attach a label (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_label, requires = "detach", help_heading = "Machine")]
    pub(crate) label: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) run: CommandArgs,
    #[command(flatten)]
    pub(crate) network: HostArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) later: LaterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
What is set here for the command is set for every `exec` in the machine, too.")]
pub(crate) struct CreateArgs {
    /// The machine; else $BANTAM_MACHINE_NAME, else a new name
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Attach a label (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_label, help_heading = "Machine")]
    pub(crate) label: Vec<(String, String)>,
    /// Stop the machine when its command ends
    #[arg(long, help_heading = "Machine")]
    pub(crate) stop_on_exit: bool,
    #[command(flatten)]
    pub(crate) context: ContextArgs,
    #[command(flatten)]
    pub(crate) network: HostArgs,
    #[command(flatten)]
    pub(crate) later: LaterArgs,
    /// What the machine runs whenever it is started; without one, the image's own
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct NamedArgs {
    #[command(flatten)]
    pub(crate) name: RequiredNameArg,
}

#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// How long the guest may take to come up
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) boot_timeout: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// How long processes in the machine have to end; a plain number is seconds
    #[arg(short, long, value_name = "TIME", value_parser = parse_grace, default_value = "5")]
    pub(crate) time: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    #[command(flatten)]
    pub(crate) name: RequiredNameArg,
    /// Do not ask, and end the machine if it runs
    #[arg(short, long)]
    pub(crate) force: bool,
    /// The same: no machine depends on another; for callers that ask for it
    #[arg(long, hide = true)]
    pub(crate) cascade: bool,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_STATUS)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// The command
    #[arg(trailing_var_arg = true, value_name = "CMD", required = true)]
    pub(crate) command: Vec<OsString>,
    /// Start the command, print its process id in the machine, and return
    #[arg(short, long, conflicts_with_all = ["interactive", "tty", "json"])]
    pub(crate) detach: bool,
    /// Output is always passed on as it comes; for callers that ask for it
    #[arg(long, hide = true)]
    pub(crate) stream: bool,
    #[command(flatten)]
    pub(crate) run: CommandArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    #[command(flatten)]
    pub(crate) context: ContextArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// An array of objects instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// One JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// Only the last so many
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(crate) limit: usize,
    /// An array of objects instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) name: NameArg,
    /// Go on with what is written, until the machine ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only the last so many lines
    #[arg(long, value_name = "N")]
    pub(crate) tail: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A directory is copied with all that is in it: to a new DST, or into a DST that is a directory;
SRC/. copies what is in SRC. On this side a file goes into a DST that is a file, a device or a FIFO,
as with cp; a DST that is a symbolic link is not followed. With - as DST a tar archive goes to
standard output, with - as SRC one is read from standard input and unpacked in the directory DST.")]
pub(crate) struct CpArgs {
    /// Keep numeric owners and set-user-ID bits (on this side, that takes root)
    #[arg(short, long)]
    pub(crate) archive: bool,
    /// If SRC is a symbolic link, copy what it leads to
    #[arg(short = 'L', long)]
    pub(crate) follow_link: bool,
    /// What to copy: PATH, NAME:/PATH, or - for a tar archive
    pub(crate) source: OsString,
    /// Where to: PATH, NAME:/PATH, or - for a tar archive
    pub(crate) destination: OsString,
}

#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    #[command(flatten)]
    pub(crate) name: RequiredNameArg,
    /// Number of vCPUs
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<u8>,
    /// Memory in MiB
    #[arg(long, value_name = "MIB", value_parser = parse_mib)]
    pub(crate) mem: Option<u32>,
    #[command(flatten)]
    pub(crate) disk: DiskArgs,
    /// Set a variable for every command (repeatable)
    #[arg(short = 'e', long = "env", value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<OsString>,
    /// Do not set a variable any more (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) remove_env: Vec<String>,
    /// Working directory of every command
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// User of every command
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Attach a label (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) label: Vec<(String, String)>,
    /// Take a label off (repeatable)
    #[arg(long, value_name = "KEY")]
    pub(crate) remove_label: Vec<String>,
    #[command(flatten)]
    pub(crate) network: NetworkChangeArgs,
    #[command(flatten)]
    pub(crate) later: LaterArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    Missing,
    Always,
    Never,
}

impl From<Pull> for PullPolicy {
    fn from(pull: Pull) -> Self {
        match pull {
            Pull::Missing => Self::Missing,
            Pull::Always => Self::Always,
            Pull::Never => Self::Never,
        }
    }
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => humantime::parse_duration(text)
            .map_err(|_| "use seconds, or units as in 1m30s or 1500ms".to_owned())?,
    };
    if duration.is_zero() {
        return Err("a timeout must be longer than nothing".to_owned());
    }
    Ok(duration)
}

/// Memory in MiB: a number, or one with a unit.
fn parse_mib(text: &str) -> Result<u32, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" | "M" | "MiB" => Some(1),
        "G" | "GiB" => Some(1 << 10),
        _ => None,
    };
    let number = digits.parse::<u32>().ok();
    number
        .zip(factor)
        .and_then(|(number, factor)| number.checked_mul(factor))
        .ok_or_else(|| "use a number of MiB, such as 512, or 2G".to_owned())
}

/// As [`parse_duration`]; nothing is allowed.
fn parse_grace(text: &str) -> Result<Duration, String> {
    match text {
        "0" | "0s" => Ok(Duration::ZERO),
        _ => parse_duration(text),
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn machine_command(words: &[&str]) -> MachineCommand {
        match Cli::try_parse_from(words).unwrap().command {
            Command::Machine(command) | Command::MachineGroup { command } => command,
            other => panic!("not about machines: {other:?}"),
        }
    }

    #[test]
    fn durations_are_seconds_unless_they_say_otherwise() {
        let parse = |text| parse_duration(text).ok();
        assert_eq!(parse("2"), Some(Duration::from_secs(2)));
        assert_eq!(parse("2s"), Some(Duration::from_secs(2)));
        assert_eq!(parse("1500ms"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("2m"), Some(Duration::from_secs(120)));
        for bad in ["", "0", "-1", "2x", "s", "99999999999999999999"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn memory_is_in_mib_unless_it_says_otherwise() {
        for (text, mib) in [
            ("512", 512),
            ("512M", 512),
            ("512MiB", 512),
            ("2G", 2048),
            ("2GiB", 2048),
        ] {
            assert_eq!(parse_mib(text), Ok(mib), "{text}");
        }
        for bad in ["", "M", "-1", "1.5G", "512K", "512MB", "5 M", "9999999G"] {
            let error = parse_mib(bad).unwrap_err();
            assert!(error.contains("MiB"), "{bad}: {error}");
        }
        assert!(parse_duration("abc").unwrap_err().contains("1m30s"));
    }

    #[test]
    fn clients_of_other_programs_may_ask_for_a_cascade() {
        let words = ["bantam", "machine", "rm", "--force", "--cascade", "-n", "x"];
        let MachineCommand::Delete(args) = machine_command(&words) else {
            panic!("not machine delete");
        };
        assert!(args.force && args.cascade);
    }

    #[test]
    fn options_after_the_command_belong_to_the_command() {
        let words = ["bantam", "vm", "run", "-I", "x", "ls", "-la", "--json"];
        let MachineCommand::Run(args) = machine_command(&words) else {
            panic!("not machine run");
        };
        assert_eq!(args.command, ["ls", "-la", "--json"]);
        assert!(!args.output.json);
    }

    #[test]
    fn an_unknown_option_before_the_command_is_no_command() {
        for words in [
            &["--no-such"][..],
            &["--no-such", "--", "ls"],
            &["-Z", "ls"],
        ] {
            let all = ["bantam", "run", "-I", "x"].iter().chain(words);
            assert!(Cli::try_parse_from(all).is_err(), "{words:?}");
        }
        let all = ["bantam", "run", "-I", "x", "--", "--odd-name"];
        assert!(Cli::try_parse_from(all).is_ok());
    }
}
