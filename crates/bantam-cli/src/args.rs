//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bantam::{EngineChoice, Exec, Home, MachineBuilder, Platform, PullPolicy, Registries};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::failure::Failure;
use crate::image::ImageCommand;

/// Run commands in microVMs made from OCI images: own kernel, no daemon, no root.
#[derive(Debug, Parser)]
#[command(name = "bantam", version, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// A caller that wants its result as JSON wants errors so, too.
    pub(crate) fn error_format(&self) -> ErrorFormat {
        match &self.command {
            Command::Run(args)
            | Command::Machine {
                command: MachineCommand::Run(args),
            } if args.json => ErrorFormat::Json,
            Command::Image { command } if command.json() => ErrorFormat::Json,
            _ => self.global.error_format,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  bantam run -I debian:12 -- bash -c 'uname -a'
  bantam run -it -I debian:12 -- bash
  bantam run -I ./image.tar -e NAME=value --timeout 30s -- python3 -c 'print(2**10)'
  tar c . | bantam run -i -I alpine:3.20 -- tar t
  bantam doctor";

/// Options of every subcommand.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Keep images and machines below DIR instead of the XDG directories
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        help_heading = "Global options"
    )]
    pub(crate) state_dir: Option<PathBuf>,
    /// How errors are written to standard error
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        default_value = "text",
        help_heading = "Global options"
    )]
    pub(crate) error_format: ErrorFormat,
    /// Speak plain HTTP to this registry; loopback addresses need no such word (repeatable)
    #[arg(
        long,
        global = true,
        value_name = "HOST[:PORT]",
        help_heading = "Global options"
    )]
    pub(crate) plain_http: Vec<String>,
    /// Ask MIRROR before the registry HOST itself (repeatable; docker.io is Docker Hub)
    #[arg(
        long,
        global = true,
        value_name = "HOST=MIRROR",
        value_parser = parse_mirror,
        help_heading = "Global options"
    )]
    pub(crate) mirror: Vec<(String, String)>,
    /// No notes and no progress on standard error
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
}

impl Global {
    pub(crate) fn home(&self) -> Result<Home, Failure> {
        match &self.state_dir {
            Some(dir) => Ok(Home::at(dir)),
            None => Ok(Home::from_env()?),
        }
    }

    /// How registries are to be reached.
    pub(crate) fn registries(&self) -> Registries {
        let mut registries = Registries {
            plain_http: self.plain_http.clone(),
            ..Registries::default()
        };
        for (host, mirror) in &self.mirror {
            let mirrors = registries.mirrors.entry(host.clone()).or_default();
            mirrors.push(mirror.clone());
        }
        registries
    }
}

fn parse_mirror(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((host, mirror)) if !host.is_empty() && !mirror.is_empty() => {
            Ok((host.to_owned(), mirror.to_owned()))
        }
        _ => Err("use HOST=MIRROR, such as docker.io=mirror.example.com".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ErrorFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Boot a one-off machine, run a command in it, remove the machine
    Run(Box<RunArgs>),
    /// Machines: `machine run` is `run`
    #[command(alias = "vm")]
    Machine {
        #[command(subcommand)]
        command: MachineCommand,
    },
    /// Images: fetch, list, inspect, remove, load and save them
    Image {
        #[command(subcommand)]
        command: Box<ImageCommand>,
    },
    /// Say what this host can do, what is missing and how to get it
    Doctor(DoctorArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum MachineCommand {
    /// Boot a one-off machine, run a command in it, remove the machine
    Run(Box<RunArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// One JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Exit status: the command's own; 124 when --timeout ran out, 126 when the command is not
/// executable, 127 when it was not found, 128+N when signal N killed it, 125 when bantam
/// itself failed, 2 for a mistake on the command line.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit status: the command's own; 124 after --timeout, 126 not executable, 127 not found,
128+N killed by signal N, 125 bantam's own failure, 2 a mistake on the command line.")]
pub(crate) struct RunArgs {
    /// Registry reference, ./archive.tar, layout or root directory, or - for standard input
    #[arg(short = 'I', long, value_name = "IMAGE")]
    pub(crate) image: String,
    /// The command; without one, the image's own
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,

    /// Pass standard input to the command
    #[arg(short = 'i', long, help_heading = "Command")]
    pub(crate) interactive: bool,
    /// Run the command on a terminal, this one
    #[arg(short = 't', long, conflicts_with = "json", help_heading = "Command")]
    pub(crate) tty: bool,
    /// Set a variable; NAME alone takes the value from here
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
    /// Replace the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM", help_heading = "Command")]
    pub(crate) entrypoint: Option<OsString>,
    /// Kill the command after so long: 500ms, 90s, 2m; a plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Command")]
    pub(crate) timeout: Option<Duration>,

    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = MachineBuilder::DEFAULT_CPUS, help_heading = "Machine")]
    pub(crate) cpus: u8,
    /// Memory in MiB
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 512,
        help_heading = "Machine"
    )]
    pub(crate) mem: u32,
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

    /// When to ask the registry
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    /// Only for an image that is not in the store
    Missing,
    /// Always, so that a tag that moved is noticed
    Always,
    /// Never: the image must be in the store
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
        Err(_) => humantime::parse_duration(text).map_err(|error| error.to_string())?,
    };
    if duration.is_zero() {
        return Err("a timeout must be longer than nothing".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
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
    fn options_after_the_command_belong_to_the_command() {
        let cli = Cli::try_parse_from(["bantam", "vm", "run", "-I", "x", "ls", "-la", "--json"]);
        let Command::Machine {
            command: MachineCommand::Run(args),
        } = cli.unwrap().command
        else {
            panic!("not machine run");
        };
        assert_eq!(args.command, ["ls", "-la", "--json"]);
        assert!(!args.json);
    }

    #[test]
    fn mirrors_of_one_registry_are_asked_in_order() {
        let mirrors = [
            "--mirror",
            "docker.io=a.example",
            "--mirror",
            "docker.io=b.example",
        ];
        let all = ["bantam", "doctor"].iter().chain(&mirrors);
        let registries = Cli::try_parse_from(all).unwrap().global.registries();
        assert_eq!(registries.mirrors["docker.io"], ["a.example", "b.example"]);
        for bad in ["docker.io", "=m", "docker.io="] {
            assert!(Cli::try_parse_from(["bantam", "doctor", "--mirror", bad]).is_err());
        }
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
