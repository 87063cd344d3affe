//! How often a short command in a warm machine wakes somebody up, on both sides.
//!
//! Counted are voluntary context switches: a thread that had nothing to do and then had.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use bantam::{EngineChoice, Machine};

use crate::machine::run_true;
use crate::memory;
use crate::program::{Bench, MEMORY_MIB};
use crate::report::{Measurement, Report};
use crate::{Error, Progress};

/// How often the command is run.
const COMMANDS: u32 = ROUNDS * ROUND;
/// The host's threads are looked at after each round: a busy host disturbs some of them.
const ROUNDS: u32 = 20;
const ROUND: u32 = 50;
/// Commands with a pause before each, in which all that can wait is done.
const LONE_COMMANDS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);
/// What the thread of the socket device is called.
const WORKER: &str = "vsock";
const SWITCHES: &str = "voluntary_ctxt_switches:";

/// Whose wake-ups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Who {
    /// The thread of this process that asks for the commands.
    Caller,
    /// The one that serves the machine's socket device.
    Worker,
    /// All others of this process; natively the vCPU's, which KVM puts to sleep when the guest halts.
    Others,
    /// QEMU's, on the emulated engine.
    Qemu,
}

/// In the order in which they are reported, with what they are called there.
const WHO: [(Who, &str); 4] = [
    (Who::Caller, "wake-ups of the host's calling thread"),
    (Who::Worker, "wake-ups of the host's vsock worker"),
    (Who::Others, "wake-ups of the host's other threads"),
    (Who::Qemu, "wake-ups of QEMU's threads"),
];

/// Voluntary switches so far, by the thread's number.
type Threads = BTreeMap<u32, (Who, u64)>;

/// Wake-ups of this process's and QEMU's threads and of the agent, switches of all the guest, and
/// interrupts of its socket device.
pub(crate) fn measure(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    progress.say("wake-ups of a command");
    let machine = Machine::builder()
        .image_source(bench.image_source()?)
        .memory_mib(MEMORY_MIB)
        .engine(EngineChoice::Only(bench.engine))
        .start()?;
    for _ in 0..5 {
        run_true(&machine)?;
    }
    let guest = Guest::look(&machine)?;
    let mut counts = vec![threads()?];
    for _ in 0..ROUNDS {
        for _ in 0..ROUND {
            run_true(&machine)?;
        }
        counts.push(threads()?);
    }
    let guest_after = Guest::look(&machine)?;
    let mut lone = 0;
    for _ in 0..LONE_COMMANDS {
        thread::sleep(PAUSE);
        let before = threads()?;
        run_true(&machine)?;
        thread::sleep(PAUSE);
        lone += grown(&before, &threads()?, Who::Worker);
    }

    let mut add = |what: &str, unit, values: Vec<f64>| {
        let name = format!("exec `true`: {what}");
        let result = Measurement::new(name, bench.engine.name(), unit, values);
        report.results.extend(result);
    };
    let each = |count: u64, commands: u32| count as f64 / f64::from(commands);
    for (who, what) in WHO {
        let of = |threads: &Threads| threads.values().any(|(whose, _)| *whose == who);
        if !counts.iter().any(of) {
            continue;
        }
        let rounds = counts.windows(2).map(|pair| match pair {
            [before, after] => each(grown(before, after, who), ROUND),
            _ => 0.0,
        });
        add(what, "wake-ups", rounds.collect());
    }
    add(
        "wake-ups of the host's vsock worker, after a pause",
        "wake-ups",
        vec![each(lone, LONE_COMMANDS)],
    );
    // Between its two looks there is one command more: to look.
    for (what, unit, count) in [
        (
            "wake-ups of the guest's agent",
            "wake-ups",
            |guest: &Guest| guest.agent,
        ),
        (
            "context switches of the guest, all tasks",
            "switches",
            |guest| guest.switches,
        ),
        ("interrupts of the guest's vsock", "interrupts", |guest| {
            guest.interrupts
        }),
    ] as [(_, _, fn(&Guest) -> u64); 3]
    {
        let more = count(&guest_after).saturating_sub(count(&guest));
        add(what, unit, vec![each(more, COMMANDS)]);
    }
    Ok(())
}

/// What the guest's kernel has counted so far.
#[derive(Debug, PartialEq, Eq)]
struct Guest {
    /// Voluntary switches of the agent, which has one thread.
    agent: u64,
    /// Switches from one task to another or to none, whoever and why.
    switches: u64,
    /// Of the socket device.
    interrupts: u64,
}

impl Guest {
    /// By one command.
    fn look(machine: &Machine) -> Result<Self, Error> {
        let files = ["/proc/1/status", "/proc/stat", "/proc/interrupts"];
        let output = machine.exec(["cat"].into_iter().chain(files)).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        Self::parse(&text).ok_or_else(|| Error::Other(format!("the guest's counts are:\n{text}")))
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            agent: number(text, SWITCHES)?,
            switches: number(text, "ctxt ")?,
            interrupts: vsock_interrupts(text),
        })
    }
}

/// How many more switches of a kind of threads there are. One that came meanwhile counts whole.
fn grown(before: &Threads, after: &Threads, who: Who) -> u64 {
    let more = |(thread, (whose, now)): (&u32, &(Who, u64))| {
        let was = before.get(thread).map_or(0, |(_, was)| *was);
        (*whose == who).then(|| now.saturating_sub(was))
    };
    after.iter().filter_map(more).sum()
}

/// The threads of this process and of those that it started.
fn threads() -> Result<Threads, Error> {
    let own = std::process::id();
    let mut counts = Threads::new();
    for pid in std::iter::once(own).chain(memory::children()?) {
        let dir = PathBuf::from(format!("/proc/{pid}/task"));
        let tasks = match fs::read_dir(&dir) {
            // A child may have ended meanwhile, as a thread may.
            Err(_) if pid != own => continue,
            tasks => tasks.map_err(Error::file("reading", &dir))?,
        };
        for task in tasks.flatten() {
            if let Some((thread, name, switches)) = thread_at(&task.path()) {
                let who = match name.trim() {
                    _ if pid != own => Who::Qemu,
                    _ if thread == own => Who::Caller,
                    WORKER => Who::Worker,
                    _ => Who::Others,
                };
                counts.insert(thread, (who, switches));
            }
        }
    }
    Ok(counts)
}

/// Number, name and switches of the thread with this folder in `/proc`.
fn thread_at(task: &Path) -> Option<(u32, String, u64)> {
    let thread = task.file_name()?.to_str()?.parse().ok()?;
    let name = fs::read_to_string(task.join("comm")).ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    Some((thread, name, number(&status, SWITCHES)?))
}

/// The number behind these words at the start of a line.
fn number(text: &str, words: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(words)?.trim().parse().ok())
}

/// Interrupts of the second virtio device, behind the image's disk; one CPU.
fn vsock_interrupts(table: &str) -> u64 {
    table
        .lines()
        .filter(|line| line.contains("virtio1"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: &str = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n\
        cpu  1 2 3\nintr 500 1\nctxt 900\nbtime 5\n\
        \x20          CPU0\n  5:   12   IO-APIC   5-edge   virtio0\n\
        \x20 6:   34   IO-APIC   6-edge   virtio1\n";

    #[test]
    fn the_guests_counts_are_found_in_its_kernels_tables() {
        let found = Guest::parse(GUEST).unwrap();
        let (agent, switches, interrupts) = (17, 900, 34);
        assert_eq!(
            found,
            Guest {
                agent,
                switches,
                interrupts
            }
        );
        assert_eq!(Guest::parse("Name:\tx\nctxt 900\n"), None);
    }

    #[test]
    fn wake_ups_are_told_apart_by_whose_they_are_and_no_thread_is_lost() {
        let before = Threads::from([
            (1, (Who::Caller, 10)),
            (2, (Who::Worker, 20)),
            (3, (Who::Others, 30)),
            // It ends.
            (4, (Who::Others, 400)),
            (9, (Who::Qemu, 90)),
        ]);
        let after = Threads::from([
            (1, (Who::Caller, 11)),
            (2, (Who::Worker, 22)),
            (3, (Who::Others, 33)),
            // It is new.
            (5, (Who::Others, 5)),
            (9, (Who::Qemu, 99)),
        ]);
        let more = WHO.map(|(who, _)| grown(&before, &after, who));
        assert_eq!(more, [1, 2, 8, 9]);
    }

    #[test]
    fn threads_of_this_process_and_of_its_children_are_found() {
        let (send, wait) = std::sync::mpsc::channel::<()>();
        let named = thread::Builder::new().name(WORKER.to_owned());
        let worker = named.spawn(move || wait.recv()).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        // The name is the thread's own first act.
        let has = |who| threads().unwrap().values().any(|(whose, _)| *whose == who);
        let all = [Who::Caller, Who::Worker, Who::Others, Who::Qemu];
        let found = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(10));
            all.iter().all(|who| has(*who))
        });
        let child_is_there = threads().unwrap().get(&child.id()).copied();
        child.kill().unwrap();
        child.wait().unwrap();
        drop(send);
        assert!(worker.join().unwrap().is_err());
        assert!(found);
        assert!(matches!(child_is_there, Some((Who::Qemu, _))));
    }
}
