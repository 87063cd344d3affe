//! What the process of a machine has to say: warnings, in its `vmm.log`.
//!
//! A guest can cause warnings without end, so there is a limit to what is written.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber, subscriber};

use crate::show::printable;

/// The most bytes that are written in the life of a process.
const LIMIT: usize = 256 << 10;

/// Sends warnings and errors of the libraries to standard error from here on.
pub(crate) fn install() {
    // Fails only if there is one already.
    let _ = subscriber::set_global_default(Log::new(io::stderr()));
}

/// Writes events as lines; spans are not used here.
struct Log<W>(Mutex<Sink<W>>);

struct Sink<W> {
    out: W,
    /// Bytes that may still be written.
    left: usize,
}

impl<W: Write> Log<W> {
    fn new(out: W) -> Self {
        Self(Mutex::new(Sink { out, left: LIMIT }))
    }
}

impl<W: Write> Sink<W> {
    fn line(&mut self, line: &str) {
        if self.left == 0 {
            return;
        }
        // A log that cannot be written is no reason to end a machine.
        let _ = match self.left.checked_sub(line.len()) {
            Some(left) => {
                self.left = left;
                self.out.write_all(line.as_bytes())
            }
            None => {
                self.left = 0;
                self.out
                    .write_all(b"the log is full: nothing more is written\n")
            }
        };
    }
}

impl<W: Write + Send + 'static> Subscriber for Log<W> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= LevelFilter::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (now, metadata) = (SystemTime::now(), event.metadata());
        let line = format!(
            "{} {} {}: {}{}\n",
            humantime::format_rfc3339_millis(now),
            metadata.level(),
            metadata.target(),
            printable(&fields.message),
            printable(&fields.others)
        );
        let mut sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sink.line(&line);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its other fields as ` name=value`.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(act: impl FnOnce()) -> String {
        let kept = Kept::default();
        subscriber::with_default(Log::new(kept.clone()), act);
        String::from_utf8(kept.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_warning_is_one_line_whatever_it_quotes() {
        let said = logged(|| {
            tracing::warn!(port = 7, error = %"bad\nforged\x1b[2K", "refusing a stream");
            tracing::info!("not worth a line");
        });
        let (_, rest) = said.split_once(' ').unwrap();
        assert_eq!(
            rest,
            format!(
                "WARN {}: refusing a stream port=7 error=bad\\nforged\\u{{1b}}[2K\n",
                module_path!()
            )
        );
    }

    #[test]
    fn warnings_without_end_do_not_fill_the_disk() {
        let said = logged(|| {
            for _ in 0..2 * LIMIT / 1000 {
                tracing::error!("{}", "x".repeat(1000));
            }
        });
        assert!(said.len() < LIMIT + 100, "{}", said.len());
        assert!(said.ends_with("the log is full: nothing more is written\n"));
        assert_eq!(said.matches("full").count(), 1);
    }
}
