//! Getting a vCPU out of the guest: one blocked real-time signal, no handler (see the crate's
//! documentation for why).

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use crate::{HypervisorError, Result, VcpuKicker};

/// The signal that interrupts a vCPU: `SIGRTMIN + 9`. It is sent to vCPU threads only, and blocked
/// there except inside `KVM_RUN`.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 9
}

/// How long a kick is tried again: whoever kicks does it once, and then waits for the vCPU. A signal is
/// refused while all that this user's processes may have queued (`RLIMIT_SIGPENDING`) are.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(1);

/// Bytes of the kernel's signal set, which is not the C library's (128 bytes).
const KERNEL_SIGSET_LEN: u32 = 8;

/// `struct kvm_signal_mask` with its signal set.
#[repr(C)]
struct SignalMask {
    len: u32,
    // The kernel reads the set right behind `len`, without padding.
    sigset: [u8; KERNEL_SIGSET_LEN as usize],
}

// The request number holds the size of the header alone (`_IOW(KVMIO, 0x8b, struct
// kvm_signal_mask)`).
ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, kvm_bindings::KVMIO, 0x8b, u32);

/// Who is to be kicked.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// `bind` has yet to come.
    Unbound,
    /// The kernel's id of the thread that runs the vCPU.
    Thread(libc::pid_t),
    /// The vCPU is gone.
    Gone,
}

/// The handle that other threads hold, and the vCPU's side of it.
#[derive(Debug)]
pub(super) struct Kicker {
    /// Held while signalling, so that the thread cannot end, and its id be reused, meanwhile.
    target: Mutex<Target>,
    /// A kick that `run` has not reported yet. Keeps the queue of real-time signals at one.
    pending: AtomicBool,
}

impl VcpuKicker for Kicker {
    fn kick(&self) {
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.pending.swap(true, Ordering::AcqRel)
            && let Target::Thread(tid) = *target
        {
            self.signal(tid);
        }
    }
}

impl Kicker {
    pub(super) fn new() -> Self {
        Self {
            target: Mutex::new(Target::Unbound),
            pending: AtomicBool::new(false),
        }
    }

    fn signal(&self, tid: libc::pid_t) {
        let until = Instant::now() + PATIENCE;
        loop {
            // SAFETY: tgkill takes three integers and touches no memory of ours.
            let sent =
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, kick_signal()) };
            if sent == 0 {
                return;
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EAGAIN) || Instant::now() >= until {
                // The kick is lost: let the next one try.
                self.pending.store(false, Ordering::Release);
                tracing::error!(%error, tid, "kicking a vCPU failed");
                return;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Blocks the signal on the calling thread, unblocks it inside `KVM_RUN` of `vcpu`, and takes
    /// kicks from now on. Returns whether the thread had it blocked before.
    pub(super) fn bind(&self, vcpu: &VcpuFd, id: u32) -> Result<bool> {
        let failed = |e| HypervisorError::call(format!("blocking the kick signal of vCPU {id}"), e);
        let before = change_mask(libc::SIG_BLOCK).map_err(failed)?;
        // SAFETY: `before` is an initialised set; the call only reads it.
        let was_blocked = unsafe { libc::sigismember(&raw const before, kick_signal()) } == 1;
        let mask = SignalMask {
            len: KERNEL_SIGSET_LEN,
            sigset: without_kick(&before),
        };
        // SAFETY: `mask` is a `kvm_signal_mask` followed by the `len` bytes that it announces.
        let set = unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) };
        if set != 0 {
            let error = io::Error::last_os_error();
            if !was_blocked {
                let _ = change_mask(libc::SIG_UNBLOCK);
            }
            let what = format!(
                "setting the signal mask of vCPU {id} (fd {})",
                vcpu.as_raw_fd()
            );
            return Err(HypervisorError::call(what, error));
        }
        // SAFETY: gettid takes nothing and cannot fail.
        let tid = unsafe { libc::gettid() };
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        *target = Target::Thread(tid);
        if self.pending.load(Ordering::Acquire) {
            self.signal(tid);
        }
        Ok(was_blocked)
    }

    /// Takes a kick's signal off the queue, after `KVM_RUN` returned because of it.
    ///
    /// The flag goes last: a kick that comes in between is reported together with this one, and its
    /// signal at worst makes one `run` return for nothing. It goes by a swap: that reads what such a
    /// kick wrote, so whatever its sender stored before kicking is seen after `run` returns. With a
    /// plain store the sender could find the flag still set, send nothing, and not be seen either.
    pub(super) fn acknowledge(&self) {
        drain();
        self.pending.swap(false, Ordering::AcqRel);
    }

    /// Stops taking kicks and restores the thread's mask.
    pub(super) fn unbind(&self, was_blocked: bool) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Target::Gone;
        drain();
        if !was_blocked {
            let _ = change_mask(libc::SIG_UNBLOCK);
        }
    }
}

fn kick_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set, sigaddset then changes an initialised one; the
    // signal's number is valid.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), kick_signal());
        set.assume_init()
    }
}

/// Blocks or unblocks the signal on the calling thread; returns the mask before.
fn change_mask(how: i32) -> io::Result<libc::sigset_t> {
    let set = kick_set();
    let mut before = MaybeUninit::uninit();
    // SAFETY: `set` is initialised, `before` is writable.
    let status = unsafe { libc::pthread_sigmask(how, &raw const set, before.as_mut_ptr()) };
    if status == 0 {
        // SAFETY: the call succeeded, so it filled `before`.
        Ok(unsafe { before.assume_init() })
    } else {
        Err(io::Error::from_raw_os_error(status))
    }
}

/// A thread's mask in the kernel's form, with the kick signal unblocked.
fn without_kick(mask: &libc::sigset_t) -> [u8; KERNEL_SIGSET_LEN as usize] {
    let blocked = (1..=64).filter(|&signal| {
        // SAFETY: the set is initialised; a number that is no signal gives -1.
        signal != kick_signal() && unsafe { libc::sigismember(ptr::from_ref(mask), signal) } == 1
    });
    blocked
        .fold(0u64, |bits, signal| bits | 1 << (signal - 1))
        .to_ne_bytes()
}

/// Takes all pending kick signals off the calling thread's queue. There is at most one of ours.
fn drain() {
    while take() {}
}

/// Takes a pending kick signal off the calling thread's queue; false if there is none.
fn take() -> bool {
    let set = kick_set();
    let zero = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both arguments are initialised, and no signal information is asked for. The signal
    // is blocked on this thread. A zero timeout makes the call return at once.
    let taken = unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const zero) };
    taken == kick_signal()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The limit is the process's: other tests' kicks meanwhile are tried again as well.
    #[test]
    fn a_kick_waits_for_room_among_the_users_queued_signals() {
        let limit = |new: Option<libc::rlimit>| {
            let mut old = MaybeUninit::<libc::rlimit>::uninit();
            let new = new.as_ref().map_or(ptr::null(), ptr::from_ref);
            // SAFETY: `new` is null or a limit, `old` is writable, and filled by the call.
            unsafe {
                assert_eq!(
                    libc::prlimit(0, libc::RLIMIT_SIGPENDING, new, old.as_mut_ptr()),
                    0
                );
                old.assume_init()
            }
        };
        let before = change_mask(libc::SIG_BLOCK).unwrap();
        let old = limit(None);
        limit(Some(libc::rlimit { rlim_cur: 0, ..old }));
        // SAFETY: gettid takes nothing and cannot fail.
        let tid = unsafe { libc::gettid() };
        let kicker = Kicker::new();
        *kicker.target.lock().unwrap() = Target::Thread(tid);
        let waited = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                limit(Some(old));
            });
            let start = Instant::now();
            kicker.kick();
            start.elapsed()
        });
        assert!(take());
        assert!(waited >= Duration::from_millis(40), "{waited:?}");
        // SAFETY: `before` is an initialised set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    }
}
