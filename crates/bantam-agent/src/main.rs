//! PID 1 of a bantam guest.
//!
//! The kernel starts it from the initramfs. It mounts the image under a writable
//! overlay, switches to it, says hello to the host over vsock ([`boot`]), prepares
//! what commands expect to find ([`setup`]), and then serves commands and file
//! transfers from one event loop ([`server`]) until the host shuts the guest down.
//!
//! The kernel's OOM killer never takes PID 1 of the system, and what PID 1 starts has
//! the default score: nothing needs adjusting for the agent to outlive its commands.
//!
//! Started as an ordinary process with `--serve` it serves the same on a listening Unix
//! socket that it is given as standard input, without mounting anything. That is for
//! tests of either side.
#![cfg_attr(not(test), no_main)]

mod boot;
mod cgroup;
mod command;
mod connection;
mod control;
mod cpus;
mod disk;
mod etc;
mod files;
mod lookup;
mod network;
mod paths;
mod reserve;
mod server;
mod setup;
mod start;
mod stats;
mod sys;
mod trees;
mod users;

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bantam_protocol::GuestControl;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid, sync};

use boot::{Booted, StepFailed, boot};
use control::Control;
use disk::Disk;
use server::{End, Listener, Server};

/// How long killed processes may take to go, and the host to take their last output: a
/// process stuck in the kernel, or a host that does not read, does not keep the guest
/// from powering off.
const KILL_WAIT: Duration = Duration::from_secs(1);

/// The agent's `main`; the result is its exit status.
fn run() -> i32 {
    if getpid() == Pid::from_raw(1) {
        std::panic::set_hook(Box::new(|panic| log(&panic.to_string())));
        if let Err(failed) = be_init() {
            log(&failed.to_string());
        }
        sys::power::off();
        // The kernel takes the end of PID 1 as a panic, which ends the guest too.
        return 1;
    }
    if std::env::args_os()
        .nth(1)
        .is_some_and(|flag| flag == "--serve")
    {
        let Err(error) = serve();
        log(&format!("serve the socket that is standard input: {error}"));
    } else {
        log("not PID 1; --serve serves a listening Unix socket given as standard input");
    }
    1
}

/// Boots, serves and shuts down; the power-off is left.
fn be_init() -> Result<(), StepFailed> {
    let Booted {
        control,
        listener,
        disk,
    } = boot()?;
    let mut control = Control::new(control, setup::configure, setup::set_clock);
    let cgroups = match setup::set_up() {
        Ok(cgroups) => cgroups,
        Err(failed) => {
            control.say_last(&GuestControl::BootFailed(failed.to_string()));
            return Err(failed);
        }
    };
    if let Some(disk) = &disk {
        disk.keep_reserve();
    }
    let mut server = Server::new(Listener::Vsock(listener), Some(control), cgroups)
        .map_err(StepFailed::at("set up the event loop"))?;
    let End::Shutdown { grace } = server.run().map_err(StepFailed::at("wait for events"))?;
    shut_down(&mut server, grace, disk.as_ref());
    Ok(())
}

/// Ends every process, writes everything back, and tells the host so.
fn shut_down(server: &mut Server, grace: Duration, disk: Option<&Disk>) {
    let everyone = Pid::from_raw(-1);
    // These fail only when there is no one.
    if !grace.is_zero() {
        let _ = kill(everyone, Signal::SIGTERM);
        let _ = kill(everyone, Signal::SIGCONT);
        let _ = server.run_down(Instant::now() + grace);
    }
    let _ = kill(everyone, Signal::SIGKILL);
    let _ = server.run_down(Instant::now() + KILL_WAIT);
    sync();
    if let Some(Err(failed)) = disk.map(Disk::leave) {
        log(&failed.to_string());
    }
    if let Some(control) = server.control() {
        control.say_last(&GuestControl::ShuttingDown);
    }
}

fn serve() -> Result<Infallible, std::io::Error> {
    let listener = std::io::stdin().as_fd().try_clone_to_owned()?;
    fcntl(&listener, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let listener = Listener::Unix(listener);
    let mut server = Server::new(listener, None, None)?;
    loop {
        // Without a control stream no one ends it.
        let End::Shutdown { .. } = server.run()?;
    }
}

/// A line on the console. In a guest it goes by the kernel's log, at a level that is shown there and
/// cut to what that takes: it refuses longer lines whole.
fn log(text: &str) {
    const LONGEST: usize = 900;
    let text = &text[..text.floor_char_boundary(LONGEST)];
    let level = match getpid() == Pid::from_raw(1) {
        true => "<2>",
        false => "",
    };
    let line = format!("{level}bantam-agent: {text}\n");
    let _ = nix::unistd::write(std::io::stderr(), line.as_bytes());
}
