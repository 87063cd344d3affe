//! Debian packages that the other commands need.

use std::io::{IsTerminal, Write};
use std::process::Command;

use clap::Args;

use crate::error::{Error, Result};
use crate::host;
use crate::progress::say;

/// What a set of packages is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// Building the guest kernel.
    Build,
    /// Running machines where there is no KVM; the nested rig.
    Run,
    /// Making the demo's image.
    Demo,
    /// What tests compare with or use as fixtures.
    Test,
}

impl Set {
    const ALL: [Self; 4] = [Self::Build, Self::Run, Self::Demo, Self::Test];

    /// Debian 12 package names.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Build => &[
                "bc",
                "binutils",
                "bison",
                "e2fsprogs",
                "flex",
                "gcc",
                "libc6-dev",
                "libelf-dev",
                "linux-source-6.12",
                "make",
                "patch",
                "xz-utils",
            ],
            Self::Run => &["qemu-system-x86"],
            Self::Demo => &["mmdebstrap"],
            Self::Test => &[
                "apache2-utils",
                "attr",
                "bash-static",
                "buildah",
                "busybox-static",
                "cpio",
                "docker-registry",
                "erofs-utils",
                "g++",
                "golang-1.19-src",
                "iperf3",
                "iproute2",
                "libarchive-tools",
                "libpython3.11-testsuite",
                "openssl",
                "passt",
                "skopeo",
                "strace",
                "time",
                "umoci",
                "zstd",
            ],
        }
    }
}

/// Which packages `cargo xtask setup` installs.
#[derive(Args, Clone, Copy)]
pub(crate) struct SetupArgs {
    /// Everything, tests included (default: what `cargo xtask demo` needs)
    #[arg(long)]
    all: bool,
    /// Do not ask before installing
    #[arg(long, short)]
    yes: bool,
}

/// `cargo xtask setup`.
pub(crate) fn command(args: SetupArgs) -> Result<()> {
    let sets: &[Set] = if args.all {
        &Set::ALL
    } else {
        &[Set::Build, Set::Run, Set::Demo]
    };
    if !ensure(sets, args.yes)? {
        say("nothing to install");
    }
    Ok(())
}

/// Installs what is missing of these sets; tells whether anything was.
pub(crate) fn ensure(sets: &[Set], yes: bool) -> Result<bool> {
    let missing = missing(sets)?;
    if missing.is_empty() {
        return Ok(false);
    }
    let by_hand = format!(
        "apt-get update && apt-get install --no-install-recommends {}",
        missing.join(" ")
    );
    say(&format!("to install (Debian): {}", missing.join(" ")));
    let prefix = root_prefix().ok_or_else(|| {
        Error::other(format!(
            "installing packages needs root, and sudo is not there. As root:\n  {by_hand}"
        ))
    })?;
    if !yes && !confirmed()? {
        return Err(Error::other(format!(
            "nothing installed. To do it yourself, as root:\n  {by_hand}"
        )));
    }
    host::run(&mut apt_get(prefix, &["update", "--quiet"]))?;
    let mut install = apt_get(prefix, &["install", "--yes", "--no-install-recommends"]);
    install.args(&missing);
    host::run(&mut install)?;
    Ok(true)
}

/// Packages of these sets that are not installed.
fn missing(sets: &[Set]) -> Result<Vec<&'static str>> {
    let wanted: Vec<&str> = sets
        .iter()
        .flat_map(|set| set.packages())
        .copied()
        .collect();
    if !host::has_program("dpkg-query") || !host::has_program("apt-get") {
        return Err(Error::other(format!(
            "this command knows Debian's packages only, and this machine has no dpkg. \
             Install what matches: {}",
            wanted.join(" ")
        )));
    }
    // dpkg-query fails when it does not know one of the names: that one is
    // missing, the others are on its output.
    let out = Command::new("dpkg-query")
        .args(["-W", "-f=${Package} ${db:Status-Status}\n"])
        .args(&wanted)
        .output()
        .map_err(|source| Error::Start {
            program: "dpkg-query".to_owned(),
            source,
        })?;
    let known = String::from_utf8_lossy(&out.stdout).into_owned();
    Ok(wanted
        .into_iter()
        .filter(|name| !known.lines().any(|l| l == format!("{name} installed")))
        .collect())
}

/// What to put before apt-get: nothing for root, sudo where it is installed.
fn root_prefix() -> Option<&'static [&'static str]> {
    let id = host::first_line(Command::new("id").arg("-u")).ok()?;
    if id == "0" {
        Some(&[])
    } else if host::has_program("sudo") {
        Some(&["sudo", "--"])
    } else {
        None
    }
}

fn apt_get(prefix: &[&str], args: &[&str]) -> Command {
    let words: Vec<&str> = prefix
        .iter()
        .copied()
        .chain(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"])
        .chain(args.iter().copied())
        .collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Asks on a terminal. Elsewhere nobody can answer, and who runs a script
/// wants it done.
fn confirmed() -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(true);
    }
    let _ = write!(std::io::stderr(), "install them now? [Y/n] ");
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .map_err(Error::file("reading", "standard input".as_ref()))?;
    Ok(matches!(answer.trim(), "" | "y" | "Y" | "yes"))
}
