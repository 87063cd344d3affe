//! Progress of pulls and conversions, on standard error: bars on a terminal, lines elsewhere.

use std::collections::HashMap;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bantam::{Layer, NoProgress, Progress, Stage};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::show::printable;

/// Work that takes less than this is not worth a word.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often a line is written where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The reporter that fits standard error.
pub(crate) fn reporter(quiet: bool) -> Arc<dyn Progress + Send + Sync> {
    if quiet {
        Arc::new(NoProgress)
    } else if io::stderr().is_terminal() {
        Arc::new(Bars::default())
    } else {
        Arc::new(Lines::new(Box::new(io::stderr())))
    }
}

fn verb(stage: Stage) -> &'static str {
    match stage {
        Stage::Download => "pulling",
        Stage::Apply => "unpacking",
    }
}

/// The first digits of a digest, enough for a person.
fn short(digest: &str) -> &str {
    let hex = digest.split_once(':').map_or(digest, |(_, hex)| hex);
    hex.get(..12).unwrap_or(hex)
}

/// One bar per layer and stage.
#[derive(Default)]
struct Bars {
    bars: MultiProgress,
    layers: Mutex<HashMap<(usize, bool), ProgressBar>>,
}

impl Bars {
    fn key(stage: Stage, layer: &Layer) -> (usize, bool) {
        (layer.index, stage == Stage::Apply)
    }

    fn with(&self, stage: Stage, layer: &Layer, act: impl FnOnce(&ProgressBar)) {
        let layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = layers.get(&Self::key(stage, layer)) {
            act(bar);
        }
    }
}

impl Progress for Bars {
    fn layer_started(&self, stage: Stage, layer: &Layer) {
        let style = ProgressStyle::with_template(
            "{prefix:>10} {msg} [{bar:30}] {bytes:>10}/{total_bytes:<10} {bytes_per_sec}",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
        let bar = self.bars.add(ProgressBar::new(layer.size));
        bar.set_style(style);
        bar.set_prefix(verb(stage));
        bar.set_message(short(&layer.digest).to_owned());
        self.layers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(Self::key(stage, layer), bar);
    }

    fn layer_advanced(&self, stage: Stage, layer: &Layer, bytes: u64) {
        self.with(stage, layer, |bar| bar.inc(bytes));
    }

    fn layer_finished(&self, stage: Stage, layer: &Layer) {
        self.with(stage, layer, ProgressBar::finish_and_clear);
    }

    fn message(&self, text: &str) {
        // A terminal that went away needs no message.
        let _ = self.bars.println(printable(text));
    }
}

/// A line now and then.
struct Lines {
    state: Mutex<LineState>,
}

struct LineState {
    sink: Box<dyn Write + Send>,
    layers: HashMap<(usize, bool), Work>,
}

struct Work {
    begun: Instant,
    said: Option<Instant>,
    done: u64,
}

impl Lines {
    fn new(sink: Box<dyn Write + Send>) -> Self {
        Self {
            state: Mutex::new(LineState {
                sink,
                layers: HashMap::new(),
            }),
        }
    }

    fn update(&self, stage: Stage, layer: &Layer, bytes: u64, finished: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let work = state.layers.entry(Bars::key(stage, layer)).or_insert(Work {
            begun: now,
            said: None,
            done: 0,
        });
        work.done = work.done.saturating_add(bytes);
        let due = match work.said {
            None => now.duration_since(work.begun) >= PATIENCE,
            Some(said) => finished || now.duration_since(said) >= LINE_EVERY,
        };
        if !due {
            return;
        }
        work.said = Some(now);
        let line = format!(
            "{} layer {}: {}{}",
            verb(stage),
            short(&layer.digest),
            mebibytes(work.done, layer.size),
            if finished { ", done" } else { "" }
        );
        // Progress is a courtesy; where nobody reads it, it is dropped.
        let _ = writeln!(state.sink, "{line}");
    }
}

fn mebibytes(done: u64, size: u64) -> String {
    format!("{} of {} MiB", done >> 20, size.div_ceil(1 << 20))
}

impl Progress for Lines {
    fn layer_started(&self, stage: Stage, layer: &Layer) {
        self.update(stage, layer, 0, false);
    }

    fn layer_advanced(&self, stage: Stage, layer: &Layer, bytes: u64) {
        self.update(stage, layer, bytes, false);
    }

    fn layer_finished(&self, stage: Stage, layer: &Layer) {
        self.update(stage, layer, 0, true);
    }

    fn message(&self, text: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(state.sink, "{}", printable(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn layer() -> Layer {
        Layer {
            index: 0,
            digest: "sha256:0123456789abcdef0123".into(),
            size: 10 << 20,
        }
    }

    #[test]
    fn quick_work_is_not_talked_about() {
        let sink = Sink::default();
        let lines = Lines::new(Box::new(sink.clone()));
        lines.layer_started(Stage::Apply, &layer());
        lines.layer_advanced(Stage::Apply, &layer(), 10 << 20);
        lines.layer_finished(Stage::Apply, &layer());
        assert!(sink.0.lock().unwrap().is_empty());
    }

    #[test]
    fn slow_work_gets_a_line_with_the_layer_and_how_far_it_is() {
        let sink = Sink::default();
        let lines = Lines::new(Box::new(sink.clone()));
        lines.layer_started(Stage::Download, &layer());
        let long_ago = Instant::now().checked_sub(PATIENCE * 2).unwrap();
        for work in lines.state.lock().unwrap().layers.values_mut() {
            work.begun = long_ago;
        }
        lines.layer_advanced(Stage::Download, &layer(), 3 << 20);
        lines.layer_advanced(Stage::Download, &layer(), 1 << 20);
        lines.layer_finished(Stage::Download, &layer());
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert_eq!(
            text,
            "pulling layer 0123456789ab: 3 of 10 MiB\n\
             pulling layer 0123456789ab: 4 of 10 MiB, done\n"
        );
    }
}
