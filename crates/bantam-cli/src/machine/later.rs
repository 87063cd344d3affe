//! What callers of other programs may ask for and this one does not do yet. It is refused, by
//! name, rather than ignored or taken for a mistake.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use crate::failure::Failure;

// Commands that are refused.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Later {
    /// Not yet: copy a running machine
    #[command(alias = "fork", hide = true)]
    Branch(AnyArgs),
    /// Not yet: hold a machine
    #[command(hide = true)]
    Pause(AnyArgs),
    /// Not yet: let a held machine go on
    #[command(hide = true)]
    Resume(AnyArgs),
    /// Not yet: save a running machine
    #[command(hide = true)]
    Checkpoint(AnyArgs),
}

// Whatever follows.
#[derive(Debug, Args)]
pub(crate) struct AnyArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

impl Later {
    pub(crate) fn refusal(&self) -> Failure {
        Failure::NoSuchCommandYet(match self {
            Self::Branch(_) => "`machine branch`",
            Self::Pause(_) => "`machine pause`",
            Self::Resume(_) => "`machine resume`",
            Self::Checkpoint(_) => "`machine checkpoint`",
        })
    }
}

macro_rules! later_args {
    (
        values { $($value:ident $long:literal $(short $short:literal)?,)* }
        flags { $($flag:ident $flag_long:literal,)* }
    ) => {
        // Options that are refused.
        #[derive(Debug, Default, Args)]
        pub(crate) struct LaterArgs {
            $(#[arg(long = $long, $(short = $short,)? hide = true)]
            $value: Vec<OsString>,)*
            $(#[arg(long = $flag_long, hide = true)]
            $flag: bool,)*
        }

        impl LaterArgs {
            /// Refuses the first that was given.
            pub(crate) fn check(&self) -> Result<(), Failure> {
                $(if !self.$value.is_empty() {
                    return Err(Failure::NotYet(concat!("--", $long)));
                })*
                $(if self.$flag {
                    return Err(Failure::NotYet(concat!("--", $flag_long)));
                })*
                Ok(())
            }
        }
    };
}

later_args! {
    values {
        volume "volume" short 'v',
        network "network",
        guest_subnet "guest-subnet",
        credential "credential",
        proxy "proxy",
        no_proxy "no-proxy",
        gpu_vram "gpu-vram",
        disk_path "disk",
        smolfile "smolfile" short 's',
        from "from",
        init "init",
        secret_env "secret-env",
        secret_file "secret-file",
        expose_socket "expose-socket",
        mount_socket "mount-socket",
    }
    flags {
        outbound_localhost_only "outbound-localhost-only",
        allow_system_mounts "allow-system-mounts",
        gpu "gpu",
        cuda "cuda",
        nested "nested",
        rosetta "rosetta",
        ssh_agent "ssh-agent",
        docker_socket "docker-socket",
        docker_config "docker-config",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::machine::MachineCommand;

    #[test]
    fn what_is_not_there_yet_is_refused_by_name_and_never_ignored() {
        for (words, named) in [
            (&["-v", "/a:/b"][..], "--volume"),
            (&["--gpu"], "--gpu"),
            (&["--secret-env=A=B"], "--secret-env"),
        ] {
            let all = ["bantam", "run", "-I", "x"].iter().chain(words);
            let Command::Machine(MachineCommand::Run(args)) =
                Cli::try_parse_from(all).unwrap().command
            else {
                panic!("not run");
            };
            let failure = args.later.check().unwrap_err();
            assert_eq!(failure.exit_code(), 125);
            assert!(
                matches!(failure, Failure::NotYet(name) if name == named),
                "{words:?}"
            );
        }
    }

    #[test]
    fn commands_that_are_not_there_yet_take_whatever_comes() {
        let all = ["bantam", "machine", "branch", "--from", "a", "-n", "b"];
        let Command::MachineGroup {
            command: MachineCommand::Later(later),
        } = Cli::try_parse_from(all).unwrap().command
        else {
            panic!("not branch");
        };
        assert!(matches!(later.refusal(), Failure::NoSuchCommandYet(_)));
    }
}
