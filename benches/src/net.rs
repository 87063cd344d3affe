//! The network's speed, beside QEMU's own (slirp) and passt: the same machine each time, but for what
//! stands behind its card.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::peers;
use crate::program::{self, Bench};
use crate::report::Report;
use crate::{Error, Progress};

/// Where the host's loopback is, as the guest sees it: the gateway. The others are told to be there,
/// too.
const GATEWAY: &str = "10.231.118.1";
const GUEST: &str = "10.231.118.2";
/// For how long iperf3 sends in each direction.
const SECONDS: u32 = 4;
/// HTTP requests, one after the other, each over a connection of its own.
const REQUESTS: usize = 1000;
/// Bytes of an answer's body.
const BODY: usize = 1024;

/// What stands behind the card.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Network {
    Ours,
    Slirp,
    Passt,
}

const ALL: [Network; 3] = [Network::Ours, Network::Slirp, Network::Passt];

impl Network {
    fn peer(self) -> Option<&'static str> {
        match self {
            Network::Ours => None,
            Network::Slirp => Some("slirp (QEMU)"),
            Network::Passt => Some("passt"),
        }
    }
}

/// What one machine measured.
struct Numbers {
    to_host: Transfer,
    to_guest: Transfer,
    /// Milliseconds of each request.
    requests: Vec<f64>,
    /// Interrupts of the guest's card, and frames both ways, for each request.
    request_interrupts: f64,
    request_frames: f64,
}

struct Transfer {
    /// Megabits a second.
    rate: f64,
    /// Interrupts of the guest's card for each 1,000,000 bytes.
    interrupts: f64,
}

/// Measures each network `runs` times, in turns, every other one backwards.
pub(crate) fn peers(
    bench: &Bench,
    image: &Path,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    program::find("iperf3")?;
    if !image.is_file() {
        return Err(Error::Missing(
            "no image with curl and iperf3 (`cargo xtask image network` makes it)".to_owned(),
        ));
    }
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let servers = Servers::start()?;
    let mut networks = Vec::from(ALL);
    if program::find("passt").is_err() {
        report.skip("net: passt", "passt is not installed");
        networks.retain(|network| *network != Network::Passt);
    }
    let mut all: Vec<(Network, Vec<Numbers>)> = networks.iter().map(|n| (*n, Vec::new())).collect();
    for run in 1..=runs {
        let mut turn: Vec<_> = all.iter_mut().collect();
        if !peers::ours_is_first(run) {
            turn.reverse();
        }
        for (network, numbers) in turn {
            let name = network.peer().unwrap_or("ours");
            progress.say(&format!("network, {name}: {run}/{runs}"));
            numbers.push(measure(bench, *network, image, &servers, temp.path())?);
        }
    }
    let engine = bench.engine.name();
    for (network, numbers) in all {
        let mut add = |name: &str, unit, values| match network.peer() {
            None => report.add(name, engine, unit, values),
            Some(peer) => report.add_peer(peer, name, engine, unit, values),
        };
        let each = |number: fn(&Numbers) -> f64| numbers.iter().map(number).collect();
        add("net: to the host", "Mbit/s", each(|n| n.to_host.rate));
        add("net: to the guest", "Mbit/s", each(|n| n.to_guest.rate));
        let out = each(|n| n.to_host.interrupts);
        add("net: to the host, for 1 MB", "interrupts", out);
        let back = each(|n| n.to_guest.interrupts);
        add("net: to the guest, for 1 MB", "interrupts", back);
        let interrupts = each(|n| n.request_interrupts);
        add("net: HTTP request", "interrupts", interrupts);
        add("net: HTTP request", "frames", each(|n| n.request_frames));
        let requests = numbers.into_iter().flat_map(|n| n.requests).collect();
        add("net: HTTP request", "ms", requests);
    }
    Ok(())
}

fn measure(
    bench: &Bench,
    network: Network,
    image: &Path,
    servers: &Servers,
    temp: &Path,
) -> Result<Numbers, Error> {
    let iperf = format!(
        "iperf3 --client {GATEWAY} --port {} --time {SECONDS} --json",
        servers.iperf_port
    );
    let url = format!("http://{GATEWAY}:{}/", servers.http_port);
    // curl's time is from its beginning of a request to its last byte, with the connection.
    let script = format!(
        "card=/sys/class/net/eth0 && \
         line=$(basename $(readlink $card/device)) && \
         count() {{ awk -v line=$line '$NF == line {{ print $2 }}' /proc/interrupts && \
         cat $card/statistics/rx_packets $card/statistics/tx_packets; }} && \
         count > /tmp/counts && {iperf} > /tmp/up && \
         count >> /tmp/counts && {iperf} --reverse > /tmp/down && \
         count >> /tmp/counts && \
         curl --silent --show-error --fail --output /dev/null \
         --write-out '%{{time_total}}\\n' '{url}[1-{REQUESTS}]' > /tmp/times && \
         count >> /tmp/counts && \
         for part in up down counts times; do cat /tmp/$part; echo end; done"
    );
    let mut run = Command::new(&bench.program);
    run.args(["run", "--quiet", "--engine", bench.engine.name()])
        .args(["--mem", "512", "--net", "--allow-host-loopback"])
        .arg("--image")
        .arg(image)
        .args(["--", "sh", "-c", &script])
        .stdin(Stdio::null());
    let _peer = match network {
        Network::Ours => None,
        Network::Slirp => {
            let slirp = format!(
                "user,id=$id,ipv6=off,net={GATEWAY}/24,host={GATEWAY},dns=10.231.118.3,\
                 dhcpstart=10.231.118.15"
            );
            run.env("BANTAM_QEMU", wrapper(temp, &slirp, None)?);
            None
        }
        Network::Passt => {
            let passt = Passt::start(temp)?;
            let stream = format!(
                "stream,id=$id,server=off,addr.type=unix,addr.path={}",
                passt.socket.display()
            );
            // What passt tells a guest that asks it.
            run.env("BANTAM_QEMU", wrapper(temp, &stream, Some(65_520))?);
            Some(passt)
        }
    };
    let out = run.output().map_err(Error::start(&run))?;
    if !out.status.success() {
        return Err(Error::Program {
            program: format!("{run:?}"),
            status: out.status.to_string(),
            said: String::from_utf8_lossy(&out.stderr).into_owned(),
        });
    }
    let text = String::from_utf8_lossy(&out.stdout);
    parse(&text).ok_or_else(|| Error::Other(format!("the machine said {text:?}")))
}

/// Two reports of iperf3; interrupts, frames to the guest and from it, four times; curl's times.
fn parse(text: &str) -> Option<Numbers> {
    let mut parts = text.split("\nend\n");
    let mut report = || -> Option<(f64, f64)> {
        let report: serde_json::Value = serde_json::from_str(parts.next()?).ok()?;
        let received = &report["end"]["sum_received"];
        let bits = received["bits_per_second"].as_f64()?;
        Some((bits / 1e6, received["bytes"].as_f64()? / 1e6))
    };
    let (out, back) = (report()?, report()?);
    let counts = lines(parts.next()?)?;
    let after = |step: usize, count: usize| {
        let at = |step: usize| counts.get(3 * step + count).copied();
        Some(at(step)? - at(step - 1)?)
    };
    let transfer = |(rate, megabytes): (f64, f64), step| {
        let interrupts = after(step, 0)? / megabytes;
        Some(Transfer { rate, interrupts })
    };
    let requests: Vec<f64> = lines(parts.next()?)?.iter().map(|s| s * 1e3).collect();
    let of_request = |count: f64| count / REQUESTS as f64;
    (requests.len() == REQUESTS).then_some(Numbers {
        to_host: transfer(out, 1)?,
        to_guest: transfer(back, 2)?,
        requests,
        request_interrupts: of_request(after(3, 0)?),
        request_frames: of_request(after(3, 1)? + after(3, 2)?),
    })
}

/// The number in each line.
fn lines(text: &str) -> Option<Vec<f64>> {
    text.lines().map(|line| line.parse().ok()).collect()
}

/// A program that is QEMU with another network behind its card: `netdev` in place of the engine's,
/// and `mtu` of the card's. The engine starts it with an empty environment, so everything stands in
/// it.
fn wrapper(dir: &Path, netdev: &str, mtu: Option<u16>) -> Result<PathBuf, Error> {
    let qemu = match std::env::var_os("BANTAM_QEMU") {
        Some(path) => PathBuf::from(path),
        None => program::find("qemu-system-x86_64")?,
    };
    let mtu = mtu.map_or(String::new(), |mtu| {
        format!("virtio-net-device,*) word=\"${{word%,host_mtu=*}},host_mtu={mtu}\" ;;\n")
    });
    let script = format!(
        "#!/bin/sh\n\
         left=$#\n\
         while [ $left -gt 0 ]; do\n\
         word=$1\n\
         shift\n\
         case $word in\n\
         vhost-user,id=*) id=${{word#vhost-user,id=}}; id=${{id%%,*}}; word=\"{netdev}\" ;;\n\
         {mtu}\
         esac\n\
         set -- \"$@\" \"$word\"\n\
         left=$((left - 1))\n\
         done\n\
         exec '{}' \"$@\"\n",
        qemu.display()
    );
    let path = dir.join("qemu");
    fs::write(&path, script).map_err(Error::file("writing", &path))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))
        .map_err(Error::file("writing", &path))?;
    Ok(path)
}

/// passt, until dropped.
struct Passt {
    child: Child,
    socket: PathBuf,
}

impl Passt {
    fn start(dir: &Path) -> Result<Self, Error> {
        let socket = dir.join("passt");
        let mut passt = Command::new("passt");
        passt
            .args(["--foreground", "--one-off", "--ipv4-only"])
            .args(["--address", GUEST, "--netmask", "30"])
            .args(["--gateway", GATEWAY])
            .args(["--no-dhcp", "--no-ra", "--no-ndp", "--runas", "0"])
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = passt.spawn().map_err(Error::start(&passt))?;
        let mut said = child
            .stderr
            .take()
            .map(BufReader::new)
            .into_iter()
            .flat_map(|said| said.lines().map_while(Result::ok));
        let bound = said.any(|line| line.contains("socket bound"));
        let passt = Self { child, socket };
        if !bound {
            return Err(Error::Other("passt does not start".to_owned()));
        }
        // It must not be stopped by a full pipe.
        thread::spawn(move || said.for_each(drop));
        Ok(passt)
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// What the guest speaks to, on the host's loopback.
struct Servers {
    iperf: Child,
    iperf_port: u16,
    http_port: u16,
}

impl Servers {
    fn start() -> Result<Self, Error> {
        let listen = || {
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                .map_err(|error| Error::Other(format!("listening on the loopback: {error}")))
        };
        let port = |listener: &TcpListener| {
            let address = listener.local_addr();
            address
                .map(|address| address.port())
                .map_err(|error| Error::Other(format!("listening on the loopback: {error}")))
        };
        // The port is free now; if it is taken in between, iperf3 says so.
        let iperf_port = port(&listen()?)?;
        let mut iperf = Command::new("iperf3");
        iperf
            .args(["--server", "--bind", "127.0.0.1", "--forceflush"])
            .args(["--port", &iperf_port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut iperf = iperf.spawn().map_err(Error::start(&iperf))?;
        let mut lines = iperf
            .stdout
            .take()
            .map(BufReader::new)
            .into_iter()
            .flat_map(|lines| lines.lines().map_while(Result::ok));
        let listening = lines.any(|line| line.contains("listening"));
        thread::spawn(move || lines.for_each(drop));
        let http = listen()?;
        let servers = Self {
            iperf,
            iperf_port,
            http_port: port(&http)?,
        };
        if !listening {
            return Err(Error::Other("iperf3 does not start".to_owned()));
        }
        thread::spawn(move || {
            for stream in http.incoming().map_while(Result::ok) {
                thread::spawn(move || answer(stream));
            }
        });
        Ok(servers)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let _ = self.iperf.kill();
        let _ = self.iperf.wait();
    }
}

/// Answers one HTTP request and closes.
fn answer(mut stream: TcpStream) {
    let request = BufReader::new(&stream);
    let asked = request
        .lines()
        .map_while(Result::ok)
        .any(|line| line.is_empty());
    if asked {
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\nConnection: close\r\n\r\n");
        let answer = [head.as_bytes(), &[b'x'; BODY]].concat();
        // A client that is gone is its own measurement's error.
        let _ = stream.write_all(&answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_counts_and_times_are_found_in_what_the_machine_says() {
        let report = |bits: f64, bytes: f64| {
            let sum = format!("{{\"bits_per_second\": {bits}, \"bytes\": {bytes}}}");
            format!("{{\"end\": {{\"sum_received\": {sum}}}}}\nend\n")
        };
        let (out, back) = (report(8e6, 2e6), report(9e6, 3e6));
        let counts = "10\n1\n1\n30\n5\n5\n90\n9\n9\n3090\n2009\n3009\nend\n";
        let text = out + &back + counts + &"0.0015\n".repeat(REQUESTS) + "end\n";
        let n = parse(&text).unwrap();
        assert_eq!((n.to_host.rate, n.to_host.interrupts), (8.0, 10.0));
        assert_eq!((n.to_guest.rate, n.to_guest.interrupts), (9.0, 20.0));
        assert_eq!((n.request_interrupts, n.request_frames), (3.0, 5.0));
        assert!((n.requests[0] - 1.5).abs() < 1e-9);
        let less = text.replacen("0.0015\n", "", 1);
        assert!(parse(&less).is_none(), "a request is missing");
    }
}
