//! The native engine on the mock hypervisor: what it asks for, in which order, and how every
//! kind of exit is answered.

use std::io::Write;
use std::time::Duration;

use bantam_hypervisor::mock::{Call, MockHypervisor, Step};
use bantam_hypervisor::{DataMatch, Gsi, IoAddress};
use tempfile::NamedTempFile;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::devices::DeviceSet;
use crate::vm::ExitLatch;
use crate::{ConsoleLog, EngineChoice, GuestKernel, MemorySize, Timeline};

/// An ELF file that is just enough for the loader: one page of code.
fn tiny_kernel() -> Vec<u8> {
    const ENTRY: u32 = 0x10_0000;
    let mut elf = vec![0; 0x1000];
    elf[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let mut put = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
    put(16, &2_u16.to_le_bytes()); // ET_EXEC
    put(18, &62_u16.to_le_bytes()); // x86_64
    put(20, &1_u32.to_le_bytes());
    put(24, &u64::from(ENTRY).to_le_bytes());
    put(32, &64_u64.to_le_bytes()); // program headers
    put(52, &64_u16.to_le_bytes());
    put(54, &56_u16.to_le_bytes());
    put(56, &1_u16.to_le_bytes());
    let header = |kind: u32, offset: u64, addr: u64, len: u64, align: u64| {
        let mut bytes = [kind.to_le_bytes(), 5_u32.to_le_bytes()].concat();
        for word in [offset, addr, addr, len, len, align] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    };
    put(64, &header(1, 0x1000, u64::from(ENTRY), 0x1000, 0x1000));
    elf.resize(0x2000, 0xf4);
    elf
}

struct Bench {
    config: VmConfig,
    _files: [NamedTempFile; 2],
}

impl Bench {
    fn new(cpus: u8) -> Self {
        let file = |bytes: &[u8]| {
            let mut file = NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            file
        };
        let files = [file(&tiny_kernel()), file(b"initramfs")];
        Self {
            config: VmConfig {
                cpus,
                memory: MemorySize::from_mib(64).unwrap(),
                guest: GuestKernel {
                    kernel: files[0].path().into(),
                    initramfs: files[1].path().into(),
                },
                disks: Vec::new(),
                network: None,
                engine: EngineChoice::Auto,
                extra_cmdline: None,
            },
            _files: files,
        }
    }

    fn start(&self, hypervisor: &MockHypervisor) -> (Running, ExitLatch, ConsoleLog) {
        let (devices, _handles) = DeviceSet::build(&self.config).unwrap();
        let (console, exit) = (ConsoleLog::new(), ExitLatch::default());
        let context = StartContext {
            devices,
            console: console.clone(),
            exit: exit.clone(),
            timeline: Timeline::start(),
        };
        let running = start_on(hypervisor, &self.config, context).unwrap();
        (running, exit, console)
    }

    /// Runs the script of vCPU 0 to its end; vCPU 1, if there is one, waits.
    fn run(&self, script: &[Step]) -> (ExitCause, Vec<Call>, ConsoleLog) {
        let hypervisor = MockHypervisor::new()
            .script(0, script.iter().cloned())
            .script(1, [Step::UntilKicked]);
        let (running, exit, console) = self.start(&hypervisor);
        let cause = exit.wait(Some(Duration::from_secs(10))).unwrap();
        drop(running);
        (cause, hypervisor.calls(), console)
    }
}

fn answers(calls: &[Call]) -> Vec<Vec<u8>> {
    let answer = |call: &Call| match call {
        Call::ReadCompleted { data, .. } => Some(data.clone()),
        _ => None,
    };
    calls.iter().filter_map(answer).collect()
}

#[test]
fn a_machine_is_built_before_any_vcpu_runs() {
    let (cause, calls, _) = Bench::new(2).run(&[Step::Shutdown]);
    assert_eq!(cause, ExitCause::GuestShutdown);
    let at = |wanted: &dyn Fn(&Call) -> bool| calls.iter().position(wanted).unwrap();
    let memory = at(&|call| matches!(call, Call::MapMemory { guest_addr: 0, .. }));
    let first_bind = at(&|call| matches!(call, Call::Bind(_)));
    let vcpus: Vec<_> = (0..2)
        .map(|id| at(&|call| *call == Call::CreateVcpu(id)))
        .collect();
    assert!(memory < first_bind);
    assert!(vcpus.iter().all(|&created| created < first_bind));
    // vsock alone, with three queues: one irqfd, and one ioeventfd per queue.
    assert!(at(&|call| *call == Call::Irqfd(Gsi(5))) < first_bind);
    assert!(!calls.contains(&Call::Irqfd(Gsi(6))));
    let notifications: Vec<_> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Ioeventfd(IoAddress::Mmio(addr), DataMatch::U32(queue)) => Some((*addr, *queue)),
            _ => None,
        })
        .collect();
    assert_eq!(
        notifications,
        [(0xd000_0050, 0), (0xd000_0050, 1), (0xd000_0050, 2)]
    );
}

#[test]
fn devices_answer_in_their_windows_and_nothing_elsewhere() {
    let read = |addr, size| Step::MmioRead { addr, size };
    let (_, calls, _) = Bench::new(1).run(&[
        read(0xd000_0000, 4),
        read(0xd000_0008, 4),
        read(0xd000_1000, 4),
        read(0xfec0_0000, 8),
        Step::PortIn {
            port: 0x60,
            size: 1,
        },
        Step::PortIn {
            port: 0x3fd,
            size: 1,
        },
        Step::Shutdown,
    ]);
    assert_eq!(
        answers(&calls),
        [
            b"virt".to_vec(),
            vec![19, 0, 0, 0],
            vec![0xff; 4],
            vec![0xff; 8],
            vec![0xff],
            vec![0x60]
        ]
    );
}

/// As long as the kernel's generator wants before it is ready, and never the same again.
#[test]
fn every_start_gives_the_kernel_a_seed_of_its_own() {
    let bench = Bench::new(1);
    let seed = || {
        let ram = memory::reserve(bench.config.memory).unwrap();
        load(&bench.config, 1, &ram).unwrap();
        let mut seed = [0; RNG_SEED_LEN];
        let behind_header = GuestAddress(layout::SETUP_DATA.0 + 16);
        ram.read_slice(&mut seed, behind_header).unwrap();
        seed
    };
    let seeds = [seed(), seed()];
    assert_ne!(seeds[0], seeds[1]);
    for seed in seeds {
        assert!(seed.chunks(16).all(|part| part != [0; 16]), "{seed:?}");
    }
}

#[test]
fn the_last_words_of_a_kernel_reach_the_console_log() {
    let words = b"panic\n".iter().map(|&byte| Step::PortOut {
        port: 0x3f8,
        data: vec![byte],
    });
    let script: Vec<_> = words.chain([Step::Shutdown]).collect();
    let (_, _, console) = Bench::new(1).run(&script);
    assert_eq!(console.text(), "panic\n");
}

#[test]
fn every_way_a_guest_can_end_has_its_cause() {
    use bantam_hypervisor::SystemEvent;
    let bench = Bench::new(1);
    let cause = |step: Step| bench.run(&[step]).0;
    assert_eq!(cause(Step::Shutdown), ExitCause::GuestShutdown);
    assert_eq!(
        cause(Step::SystemEvent(SystemEvent::Reset)),
        ExitCause::GuestShutdown
    );
    for step in [Step::InternalError(1), Step::FailEntry(0x8000_0021)] {
        assert!(matches!(cause(step), ExitCause::Failed(_)));
    }
}

#[test]
fn a_machine_whose_vcpus_spin_can_be_killed() {
    let hypervisor = MockHypervisor::new()
        .script(0, [Step::UntilKicked])
        .script(1, [Step::UntilKicked]);
    let bench = Bench::new(2);
    let (running, exit, _) = bench.start(&hypervisor);
    running.machine.kill();
    assert_eq!(
        exit.wait(Some(Duration::from_secs(10))),
        Some(ExitCause::Killed)
    );
    for id in 0..2 {
        assert!(hypervisor.calls().contains(&Call::Kick(id)));
    }
}

#[test]
fn any_vcpu_that_fails_ends_the_machine() {
    let hypervisor = MockHypervisor::new()
        .script(0, [Step::UntilKicked])
        .script(1, [Step::InternalError(1)]);
    let bench = Bench::new(2);
    let (running, exit, _) = bench.start(&hypervisor);
    let cause = exit.wait(Some(Duration::from_secs(10)));
    assert!(matches!(&cause, Some(ExitCause::Failed(why)) if why.contains("internal error")));
    assert!(hypervisor.calls().contains(&Call::Kick(0)));
    // Too late to be why.
    running.machine.kill();
    assert_eq!(exit.wait(None), cause);
}

/// In particular the first, whose thread takes the machine down.
#[test]
fn a_vcpu_whose_thread_panics_ends_the_machine() {
    for panics in [0, 1] {
        let mut scripts = [[Step::UntilKicked], [Step::UntilKicked]];
        scripts[panics] = [Step::Panic];
        let [first, second] = scripts;
        let hypervisor = MockHypervisor::new().script(0, first).script(1, second);
        let (running, exit, _) = Bench::new(2).start(&hypervisor);
        let cause = exit.wait(Some(Duration::from_secs(10)));
        assert_eq!(
            cause,
            Some(ExitCause::Failed(format!(
                "the thread of vCPU {panics} panicked"
            )))
        );
        running.supervisor.join().unwrap();
        assert!(hypervisor.calls().contains(&Call::Kick(1)));
    }
}
