//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use bantam::{Home, Machines, Registries};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::failure::Failure;
use crate::image::ImageCommand;
use crate::machine::MachineCommand;

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
        let json = match &self.command {
            Command::Machine(command) | Command::MachineGroup { command } => command.json(),
            Command::Image { command } => command.json(),
            Command::Doctor(args) => args.json,
            Command::Completion(_) => false,
        };
        if json {
            ErrorFormat::Json
        } else {
            self.global.error_format
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  bantam run -I debian:12 -- bash -c 'uname -a'
  bantam run -it -I debian:12 -- bash
  bantam run -I ./image.tar -e NAME=value --timeout 30s -- python3 -c 'print(2**10)'
  bantam run --allow-host pypi.org -I python:3.12 -- pip download attrs
  tar c . | bantam run -i -I alpine:3.20 -- tar t
  bantam create -n dev -I debian:12 && bantam start -n dev
  bantam exec -n dev -- bash -c 'echo kept > /root/note'
  bantam doctor

Every command about machines is also `bantam machine COMMAND`.";

/// The running program, also when its file was replaced.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

// Options of every subcommand.
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
    /// Connect to registries at public addresses only, for references that others choose
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) public_registries_only: bool,
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

    /// The named machines; their processes run this very program.
    pub(crate) fn machines(&self) -> Result<Machines, Failure> {
        Ok(Machines::open(&self.home()?).vmm_program(THIS_PROGRAM))
    }

    /// How registries are to be reached.
    pub(crate) fn registries(&self) -> Registries {
        let mut registries = Registries {
            plain_http: self.plain_http.clone(),
            public_only: self.public_registries_only,
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

/// Whether a command line that could not be understood asks for JSON, as far as can be told.
pub(crate) fn wants_json(words: impl IntoIterator<Item = OsString>) -> bool {
    // What follows `--` is another program's.
    let ours: Vec<_> = words.into_iter().take_while(|word| word != "--").collect();
    let pairs = ours.iter().zip(ours.iter().skip(1));
    ours.iter()
        .any(|word| word == "--json" || word == "--error-format=json")
        || pairs
            .into_iter()
            .any(|(option, value)| option == "--error-format" && value == "json")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ErrorFormat {
    Text,
    Json,
}

// `defer`, here and below: the arguments of a command are only made when it is the one that is run,
// which is half of the time that all took. They are then added to the command's own description, so
// none of their structures may have a `///` comment: it would take the place of that.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Command {
    #[command(flatten)]
    Machine(MachineCommand),
    /// The commands about machines, as in `machine run`
    #[command(name = "machine", alias = "vm")]
    MachineGroup {
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
    /// Print a completion script for a shell
    Completion(CompletionArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// One JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn json_is_wanted_where_bantam_itself_is_asked_for_it() {
        let wants = |text: &str| wants_json(text.split(' ').map(OsString::from));
        for text in [
            "bantam --error-format json foo",
            "bantam --error-format=json foo",
            "bantam run --json --bogus -- true",
            "bantam run --bogus --error-format json",
        ] {
            assert!(wants(text), "{text}");
        }
        for text in [
            "bantam foo",
            "bantam run --bogus -- x --json",
            "bantam --error-format text json",
        ] {
            assert!(!wants(text), "{text}");
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_is_described_alike_in_the_list_and_in_its_own_help() {
        fn check(list: &clap::Command, built: &clap::Command, below: &str) {
            for command in list.get_subcommands() {
                let name = command.get_name();
                let own = built.find_subcommand(name).unwrap();
                let about = command.get_about().map(ToString::to_string);
                assert_eq!(
                    own.get_about().map(ToString::to_string),
                    about,
                    "{below} {name}"
                );
                assert!(own.get_long_about().is_none(), "{below} {name}");
            }
        }
        let mut built = Cli::command();
        built.build();
        check(&Cli::command(), &built, "");
        let image = ImageCommand::augment_subcommands(clap::Command::new("image"));
        check(&image, built.find_subcommand("image").unwrap(), "image");
        let machine = MachineCommand::augment_subcommands(clap::Command::new("machine"));
        check(
            &machine,
            built.find_subcommand("machine").unwrap(),
            "machine",
        );
    }

    #[test]
    fn a_caller_that_wants_json_gets_errors_as_json() {
        for (words, format) in [
            (&["doctor", "--json"][..], ErrorFormat::Json),
            (&["doctor"], ErrorFormat::Text),
            (&["doctor", "--error-format", "json"], ErrorFormat::Json),
            (&["ls", "--json"], ErrorFormat::Json),
            (&["image", "ls", "--json"], ErrorFormat::Json),
        ] {
            let all = ["bantam"].iter().chain(words);
            let cli = Cli::try_parse_from(all).unwrap();
            assert_eq!(cli.error_format(), format, "{words:?}");
        }
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
}
