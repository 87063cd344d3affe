//! The signal that an image wants its process to be stopped with.

/// What the first real-time signal is called is up to the C library; images mean this one.
const SIGRTMIN: u8 = 34;
const SIGRTMAX: u8 = 64;

/// Signals by number from 1 on, as Linux has them on x86_64 and arm64.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// The number of a signal: `SIGINT`, `INT`, `2`, `SIGRTMIN+3` (OCI image-spec config.md,
/// `StopSignal`). `None` for what is no signal.
pub(super) fn parse(text: &str) -> Option<u8> {
    let text = text.trim().to_ascii_uppercase();
    if let Ok(number) = text.parse::<u8>() {
        return (1..=SIGRTMAX).contains(&number).then_some(number);
    }
    let name = text.strip_prefix("SIG").unwrap_or(&text);
    let number = match name.strip_prefix("RTMIN") {
        Some("") => SIGRTMIN,
        Some(offset) => SIGRTMIN.checked_add(offset.strip_prefix('+')?.parse().ok()?)?,
        None => match name.strip_prefix("RTMAX") {
            Some("") => SIGRTMAX,
            Some(offset) => SIGRTMAX.checked_sub(offset.strip_prefix('-')?.parse().ok()?)?,
            None => {
                let at = NAMES.iter().position(|known| *known == name)?;
                u8::try_from(at + 1).ok()?
            }
        },
    };
    (1..=SIGRTMAX).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_known_by_name_and_by_number() {
        let known = [
            ("SIGTERM", 15),
            ("term", 15),
            ("INT", 2),
            ("SIGQUIT", 3),
            ("9", 9),
            ("SIGRTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("RTMAX-1", 63),
            ("SIGWINCH", 28),
        ];
        for (text, number) in known {
            assert_eq!(parse(text), Some(number), "{text}");
        }
        for text in [
            "", "0", "65", "SIG", "NOSUCH", "RTMIN+31", "RTMIN-1", "RTMAX+1", "-1",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
