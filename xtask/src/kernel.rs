//! Builds Linux from Debian's source package and our configuration.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::host;
use crate::patches::Patches;
use crate::progress::{Progress, clock};

/// Debian's source of the kernel, and the package that brings it.
const SOURCE: &str = "/usr/src/linux-source-6.12.tar.xz";
const SOURCE_PACKAGE: &str = "linux-source-6.12";

/// Parts of the source that no configuration of ours compiles. Kconfig files
/// and makefiles stay: Kconfig reads all of them. Saves a third of the disk.
const NOT_UNPACKED: [&str; 10] = [
    "*/Documentation/*/*",
    "*/tools/testing/*",
    "*/drivers/gpu/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/staging/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/sound/*.[ch]",
    "*/arch/*.dts",
    "*/arch/*.dtsi",
];

/// Settings of make that would otherwise put this machine into the binary.
const REPRODUCIBLE: [&str; 4] = [
    "KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 1970",
    "KBUILD_BUILD_USER=bantam",
    "KBUILD_BUILD_HOST=bantam",
    "KBUILD_BUILD_VERSION=1",
];

/// The functions that the guest kernel's linker puts first, relative to the repository.
pub(crate) const FIRST_FUNCTIONS: &str = "images/kernel/first-functions";

/// Where the patched linker script looks for the functions that come first.
const FIRST_SECTIONS: &str = "arch/x86/kernel/first-functions.lds";

/// Raise to rebuild kernels that differ by this file, not by their inputs.
const RECIPE: &str = "1";

/// One kernel of the project.
pub(crate) struct Kernel {
    /// Short name, for messages and paths.
    pub(crate) name: &'static str,
    /// Configuration files, relative to the repository; later ones win.
    pub(crate) configs: &'static [&'static str],
    /// A folder of patches, relative to the repository.
    pub(crate) patches: Option<&'static str>,
    /// A list of functions that one of the patches has the linker put first.
    pub(crate) first_functions: Option<&'static str>,
    /// About how many lines make prints, for the percentage.
    pub(crate) steps: usize,
}

/// The kernel of every machine.
pub(crate) const GUEST: Kernel = Kernel {
    name: "guest kernel",
    configs: &["images/kernel/guest.config"],
    patches: Some("images/kernel/patches"),
    first_functions: Some(FIRST_FUNCTIONS),
    steps: 1850,
};

/// The kernel of the nested rig's outer machine.
pub(crate) const RIG: Kernel = Kernel {
    name: "rig kernel",
    configs: &["images/kernel/guest.config", "images/rig/outer.config"],
    // What they save at a boot does not matter there, and it hosts the tests of patched guests.
    patches: None,
    first_functions: None,
    steps: 1915,
};

/// Where a built kernel lies.
pub(crate) struct Built {
    /// The stripped ELF.
    pub(crate) vmlinux: PathBuf,
}

/// How to build.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    /// Build even when the cache has it.
    pub(crate) force: bool,
    /// Leave the source tree behind.
    pub(crate) keep: bool,
}

impl Kernel {
    /// Returns the kernel from the cache, or builds it.
    pub(crate) fn build(&self, options: Options, progress: &Progress) -> Result<Built> {
        let config = self.config()?;
        let patches = match self.patches {
            Some(folder) => Patches::read(&host::repo().join(folder))?,
            None => Patches::default(),
        };
        let functions = self.first_functions()?;
        let key = self.key(&config, &patches, functions.as_deref())?;
        let cache = host::cache_dir()?.join("build");
        let done = cache.join("kernel").join(&key);
        host::create_dir(&done)?;
        // Two commands that want the same kernel build it once.
        let lock_path = done.join("lock");
        let lock = File::create(&lock_path).map_err(Error::file("creating", &lock_path))?;
        if lock.try_lock().is_err() {
            progress.update(self.name, "waiting for another command's build".to_owned());
            lock.lock().map_err(Error::file("locking", &lock_path))?;
        }
        let built = Built {
            vmlinux: done.join("vmlinux"),
        };
        if !options.force && built.vmlinux.is_file() {
            progress.forget(self.name);
            return Ok(built);
        }
        let start = Instant::now();
        let tree = cache.join(format!("linux-{key}"));
        self.unpack(&tree, progress)?;
        let source = format!("{SOURCE_PACKAGE} {}", source_version()?);
        patches.apply(&tree, &source)?;
        if let Some(functions) = &functions {
            let sections = first_sections(functions);
            host::write_atomic(&tree.join(FIRST_SECTIONS), sections.as_bytes())?;
        }
        self.configure(&tree, &config)?;
        let steps = self.make(&tree, progress, start)?;
        keep_results(&tree, &done)?;
        if options.keep {
            progress.say(&format!("{}: source kept in {}", self.name, tree.display()));
        } else {
            host::remove_dir(&tree)?;
        }
        progress.finish(
            self.name,
            &format!("{steps} steps in {}", clock(start.elapsed())),
        );
        Ok(built)
    }

    /// All configuration lines, one after the other.
    fn config(&self) -> Result<String> {
        let mut all = String::new();
        for file in self.configs {
            let bytes = host::read(&host::repo().join(file))?;
            all.push_str(&String::from_utf8_lossy(&bytes));
        }
        Ok(all)
    }

    fn first_functions(&self) -> Result<Option<String>> {
        let Some(file) = self.first_functions else {
            return Ok(None);
        };
        let bytes = host::read(&host::repo().join(file))?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// What the result depends on, as a file name.
    fn key(&self, config: &str, patches: &Patches, functions: Option<&str>) -> Result<String> {
        let source = source_version()?;
        let compiler = host::first_line(Command::new("gcc").arg("--version"))?;
        let linker = host::first_line(Command::new("ld").arg("--version"))?;
        let wanted = wanted(config)?;
        let inputs = format!(
            "{RECIPE}\n{source}\n{compiler}\n{linker}\n{wanted:?}{}{}",
            patches.key(),
            functions.map_or_else(String::new, first_sections)
        );
        Ok(host::sha256(inputs.as_bytes())[..16].to_owned())
    }

    fn unpack(&self, tree: &Path, progress: &Progress) -> Result<()> {
        progress.update(self.name, "unpacking the source".to_owned());
        host::remove_dir(tree)?;
        host::create_dir(tree)?;
        let mut tar = Command::new("tar");
        tar.arg("xf")
            .arg(SOURCE)
            .arg("--strip-components=1")
            .arg("-C")
            .arg(tree);
        for pattern in NOT_UNPACKED {
            tar.arg(format!("--exclude={pattern}"));
        }
        host::run_quiet(&mut tar)
    }

    /// Runs Kconfig and checks that it took every line of ours.
    fn configure(&self, tree: &Path, config: &str) -> Result<()> {
        let fragment = tree.join("bantam.config");
        let wanted = wanted(config)?;
        let lines: String = wanted
            .iter()
            .map(|(option, value)| format!("{option}={value}\n"))
            .collect();
        host::write_atomic(&fragment, lines.as_bytes())?;
        let mut make = make(tree);
        make.arg("-s")
            .arg(format!("KCONFIG_ALLCONFIG={}", fragment.display()))
            .arg("allnoconfig");
        host::run_quiet(&mut make)?;
        let result = host::read(&tree.join(".config"))?;
        let dropped = dropped(&wanted, &String::from_utf8_lossy(&result));
        if dropped.is_empty() {
            return Ok(());
        }
        Err(Error::other(format!(
            "configuring the {}: Kconfig did not take these lines of {}: {} \
             (a dependency is missing, or the option is gone)",
            self.name,
            self.configs.join(" + "),
            dropped.join(", ")
        )))
    }

    /// Compiles; returns how many lines make printed.
    fn make(&self, tree: &Path, progress: &Progress, start: Instant) -> Result<usize> {
        let mut make = make(tree);
        make.arg(format!("-j{}", host::jobs()))
            .args(REPRODUCIBLE)
            .arg("vmlinux")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let log_path = tree.join("build.log");
        let mut log = File::create(&log_path).map_err(Error::file("creating", &log_path))?;
        let errors = log.try_clone().map_err(Error::file("opening", &log_path))?;
        make.stderr(Stdio::from(errors));
        let mut child = make.spawn().map_err(host::start_error(&make))?;
        let mut tail = VecDeque::new();
        let mut steps = 0_usize;
        if let Some(out) = child.stdout.take() {
            for line in BufReader::new(out).lines() {
                let line = line.map_err(Error::file("reading", Path::new("make's output")))?;
                steps += 1;
                // Never 100 % while there is work: the number is an estimate.
                let percent = (steps * 100 / self.steps).min(99);
                let elapsed = clock(start.elapsed());
                progress.update(
                    self.name,
                    format!("step {steps}, about {percent}%, {elapsed}"),
                );
                let _ = writeln!(log, "{line}");
                tail.push_back(line);
                if tail.len() > 30 {
                    tail.pop_front();
                }
            }
        }
        let status = child
            .wait()
            .map_err(Error::file("waiting for", Path::new("make")))?;
        if status.success() {
            return Ok(steps);
        }
        let said = fs::read_to_string(&log_path).unwrap_or_default();
        Err(Error::Program {
            program: format!("make vmlinux ({}, log {})", self.name, log_path.display()),
            status: status.to_string(),
            tail: host::last_lines(&said, 30),
        })
    }
}

fn make(tree: &Path) -> Command {
    let mut make = Command::new("make");
    make.current_dir(tree)
        // A caller's flags are for another makefile.
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .env("LC_ALL", "C");
    make
}

/// Strips the kernel and files it in the cache, vmlinux last: its presence
/// means that all is there.
fn keep_results(tree: &Path, done: &Path) -> Result<()> {
    host::copy_atomic(&tree.join("System.map"), &done.join("System.map"))?;
    host::copy_atomic(&tree.join(".config"), &done.join("config"))?;
    let vmlinux = done.join("vmlinux");
    let partial = host::partial_path(&vmlinux);
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-all")
        .arg("-o")
        .arg(&partial)
        .arg(tree.join("vmlinux"));
    host::run_quiet(&mut strip)?;
    fs::rename(&partial, &vmlinux).map_err(Error::file("renaming", &partial))
}

/// The version of the installed source, or how to get it.
fn source_version() -> Result<String> {
    if !Path::new(SOURCE).is_file() {
        return Err(Error::other(format!(
            "the kernel's source is missing ({SOURCE}): run `cargo xtask setup`, \
             or `apt-get install {SOURCE_PACKAGE}`"
        )));
    }
    host::first_line(Command::new("dpkg-query").args(["-W", "-f=${Version}", SOURCE_PACKAGE]))
}

/// Options and values of a configuration; a later line replaces an earlier.
fn wanted(config: &str) -> Result<BTreeMap<String, String>> {
    let mut wanted = BTreeMap::new();
    for line in config.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match line.split_once('=') {
            Some((option, value)) if option.starts_with("CONFIG_") => {
                wanted.insert(option.to_owned(), value.to_owned());
            }
            _ => {
                return Err(Error::other(format!(
                    "kernel configuration: `{line}` is neither CONFIG_X=value nor a comment"
                )));
            }
        }
    }
    Ok(wanted)
}

/// The wanted options that Kconfig's result does not have.
fn dropped(wanted: &BTreeMap<String, String>, result: &str) -> Vec<String> {
    let got: BTreeMap<&str, &str> = result
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .collect();
    wanted
        .iter()
        .filter(|(option, value)| {
            let got = got.get(option.as_str()).copied().unwrap_or("n");
            got != value.as_str()
        })
        .map(|(option, value)| format!("{option}={value}"))
        .collect()
}

/// For the linker: the section of each function of a list. A name that the kernel does not have is no
/// error, so the list may be that of another version.
fn first_sections(functions: &str) -> String {
    listed(functions)
        .map(|name| format!("*(.text.{name})\n"))
        .collect()
}

/// The names of a list of functions, one a line.
pub(crate) fn listed(functions: &str) -> impl Iterator<Item = &str> {
    let names = functions.lines().map(str::trim);
    names.filter(|name| !name.is_empty() && !name.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_become_sections_and_comments_nothing() {
        let list = "# What comes first.\n\nschedule\ndo_idle.constprop.0\n";
        let sections = "*(.text.schedule)\n*(.text.do_idle.constprop.0)\n";
        assert_eq!(first_sections(list), sections);
    }

    #[test]
    fn a_dropped_option_is_named() {
        let wanted = wanted("CONFIG_A=y\nCONFIG_B=y\nCONFIG_S=\"x\"\n").unwrap();
        let got = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_S=\"x\"\n";
        assert_eq!(dropped(&wanted, got), ["CONFIG_B=y"]);
    }

    #[test]
    fn an_option_that_must_be_off_is_named_when_it_is_on() {
        let wanted = wanted("CONFIG_A=n\nCONFIG_B=n\n").unwrap();
        assert_eq!(dropped(&wanted, "CONFIG_A=y\n"), ["CONFIG_A=n"]);
    }

    #[test]
    fn the_later_of_two_lines_counts() {
        let wanted = wanted("CONFIG_A=y\n# why\nCONFIG_A=n\n").unwrap();
        assert_eq!(wanted["CONFIG_A"], "n");
    }

    #[test]
    fn a_line_that_is_no_setting_is_refused() {
        assert!(wanted("CONFIG_A y\n").is_err());
    }
}
