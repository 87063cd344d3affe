//! Pulling an image, beside the tools that people use for it.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::peers;
use crate::program::{find, succeed};
use crate::report::{Report, milliseconds};
use crate::{Error, Progress};

const PULL: &str = "pull to a root file system";
/// Pulling needs no machine.
const ANY: &str = "any";
const THEM: &str = "skopeo, umoci";

/// Times and peak memory of one command.
struct Cost {
    ms: f64,
    mib: f64,
}

/// From a registry on this host to something to boot from: `bantam image pull` makes an EROFS file, `skopeo copy`
/// and `umoci raw unpack` make a folder. In turns, into empty stores; then a pull of
/// what the store has, which asks the registry for the tag's manifest and fetches nothing else.
pub(crate) fn pull(
    program: &Path,
    archive: &Path,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    for tool in ["skopeo", "umoci", "docker-registry"] {
        find(tool)?;
    }
    if !Path::new("/usr/bin/time").exists() {
        return Err(Error::Missing("/usr/bin/time is not installed".to_owned()));
    }
    if !archive.is_file() {
        return Err(Error::Missing(
            "no image to pull (`cargo xtask image debian` makes it)".to_owned(),
        ));
    }
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let at = |name: &str| temp.path().join(name);
    let registry = Registry::start(temp.path())?;
    let name = format!("{}/debian/python:12", registry.address);
    progress.say("pull: filling the registry");
    let from = format!("oci-archive:{}", archive.display());
    let to = format!("docker://{name}");
    let copy = ["copy", "--insecure-policy"];
    succeed(
        Command::new("skopeo")
            .args(copy)
            .arg("--dest-tls-verify=false")
            .args([&from, &to]),
    )?;

    let (mut ours, mut theirs, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for run in 1..=runs {
        progress.say(&format!("pull: {run}/{runs}"));
        let our_turn = || {
            let home = at("home");
            let pull = || {
                let mut pull = Command::new(program);
                pull.args(["image", "pull", &name])
                    .env("BANTAM_HOME", &home);
                pull
            };
            let costs = (cost(&pull(), temp.path())?, cost(&pull(), temp.path())?);
            remove(&home)?;
            Ok(costs)
        };
        let their_turn = || {
            let (layout, rootfs) = (at("layout"), at("rootfs"));
            let oci = format!("oci:{}:x", layout.display());
            let mut skopeo = Command::new("skopeo");
            skopeo
                .args(copy)
                .arg("--src-tls-verify=false")
                .args([&to, &oci]);
            let fetched = cost(&skopeo, temp.path())?;
            let mut umoci = Command::new("umoci");
            umoci
                .args(["raw", "unpack", "--image"])
                .arg(format!("{}:x", layout.display()))
                .arg(&rootfs);
            let unpacked = cost(&umoci, temp.path())?;
            remove(&layout)?;
            remove(&rootfs)?;
            Ok(Cost {
                ms: fetched.ms + unpacked.ms,
                mib: fetched.mib.max(unpacked.mib),
            })
        };
        let ((first, second), their) = peers::in_turn::<_, _, Error>(run, our_turn, their_turn)?;
        ours.push(first);
        again.push(second);
        theirs.push(their);
    }
    for (peer, what, costs) in [
        (None, PULL, ours),
        (Some(THEM), PULL, theirs),
        (None, "pull of what is stored", again),
    ] {
        let (ms, mib) = costs.into_iter().map(|c| (c.ms, c.mib)).unzip();
        let peak = format!("{what}: peak resident memory");
        match peer {
            None => {
                report.add(what, ANY, "ms", ms);
                report.add(peak, ANY, "MiB", mib);
            }
            Some(peer) => {
                report.add_peer(peer, what, ANY, "ms", ms);
                report.add_peer(peer, peak, ANY, "MiB", mib);
            }
        }
    }
    Ok(())
}

/// Runs a command under GNU time, which is asked for the peak.
fn cost(command: &Command, temp: &Path) -> Result<Cost, Error> {
    let peak = temp.join("peak");
    let mut timed = Command::new("/usr/bin/time");
    timed
        .args(["--format=%M", "--output"])
        .arg(&peak)
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            timed.env(name, value);
        }
    }
    let start = Instant::now();
    succeed(&mut timed)?;
    let ms = milliseconds(start.elapsed());
    let text = std::fs::read_to_string(&peak).map_err(Error::file("reading", &peak))?;
    let kib: f64 = text
        .trim()
        .parse()
        .map_err(|_| Error::Other(format!("GNU time said {text:?}")))?;
    Ok(Cost {
        ms,
        mib: kib / 1024.0,
    })
}

fn remove(dir: &PathBuf) -> Result<(), Error> {
    std::fs::remove_dir_all(dir).map_err(Error::file("removing", dir))
}

/// docker-registry, until dropped.
struct Registry {
    child: Child,
    address: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start(temp: &Path) -> Result<Self, Error> {
        // The port is free now; if it is taken in between, the registry says so.
        let address = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .map_err(|error| Error::Other(format!("finding a free port: {error}")))?
            .to_string();
        let file = temp.join("registry.yml");
        let config = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\nstorage:\n  filesystem: \
             {{rootdirectory: {}}}\nhttp:\n  addr: {address}\n",
            temp.join("registry").display()
        );
        std::fs::write(&file, config).map_err(Error::file("writing", &file))?;
        let mut command = Command::new("docker-registry");
        command
            .arg("serve")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(Error::start(&command))?;
        let log = child.stderr.take();
        let registry = Self { child, address };
        let mut lines = log
            .map(BufReader::new)
            .into_iter()
            .flat_map(|log| log.lines().map_while(Result::ok));
        if !lines.any(|line| line.contains("listening on")) {
            return Err(Error::Other("docker-registry does not start".to_owned()));
        }
        // It must not be stopped by a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(registry)
    }
}
