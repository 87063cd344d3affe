//! A transmit-only 16550 at the first serial port.
//!
//! It is the machine's only console, and the kernel's alone: the early console writes to it from
//! the first message to the last, so that the last words of a kernel that dies are seen whenever it
//! dies. There is no driver behind it that programs could open (`/dev/console` says ENODEV), which
//! would cost each boot some fifty exits. Nothing can be read from it and it raises no interrupt; the
//! kernel's real serial driver is told to leave it alone (see `CMDLINE`).

use std::io::Write;

use crate::ConsoleLog;

/// The first port.
const BASE: u16 = 0x3f8;
/// The port after the last.
const END: u16 = BASE + 8;
/// Transmit holding register.
const DATA: u16 = BASE;
/// Line status register.
const LINE_STATUS: u16 = BASE + 5;
/// Both transmit registers are empty: the host never makes the guest wait.
const TRANSMITTER_EMPTY: u8 = 0x60;

/// Kernel words that send messages here, also after another console (a kernel's own virtual terminal)
/// has come.
pub(super) const CMDLINE: &str = "earlycon=uart8250,io,0x3f8 keep_bootcon 8250.nr_uarts=0";

/// Whether the port belongs to the UART.
pub(super) fn owns(port: u16) -> bool {
    (BASE..END).contains(&port)
}

/// What a read of the UART gives.
pub(super) fn read(port: u16) -> u8 {
    match port {
        LINE_STATUS => TRANSMITTER_EMPTY,
        _ => 0,
    }
}

/// A write to the UART.
pub(super) fn write(port: u16, data: &[u8], log: &ConsoleLog) {
    if port == DATA {
        // Writing to memory cannot fail.
        let _ = log.clone().write_all(data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_to_the_data_register_is_logged() {
        let log = ConsoleLog::new();
        for port in 0..=u16::MAX {
            if owns(port) {
                write(port, &[b'a' + u8::try_from(port - BASE).unwrap()], &log);
            }
        }
        assert_eq!(log.text(), "a");
    }

    #[test]
    fn the_transmitter_is_always_ready() {
        assert_eq!(read(LINE_STATUS) & 0x60, 0x60);
        assert_eq!(read(BASE + 4), 0);
    }
}
