//! Progress of several things at once: one updating line on a terminal, a
//! plain line every fifteen seconds elsewhere.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How often a log that is not a terminal gets a line for work that goes on.
const PLAIN_INTERVAL: Duration = Duration::from_secs(15);
/// How often the terminal's line is redrawn at most.
const REDRAW_INTERVAL: Duration = Duration::from_millis(200);

/// The shared place where work reports how far it is. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Mutex<Board>>);

struct Board {
    start: Instant,
    terminal: bool,
    tasks: BTreeMap<String, String>,
    shown: Option<Instant>,
    /// Whether the terminal's current line holds a status.
    dirty: bool,
}

impl Progress {
    /// A board that reports on stderr.
    pub(crate) fn new() -> Self {
        let board = Arc::new(Mutex::new(Board {
            start: Instant::now(),
            terminal: std::io::stderr().is_terminal(),
            tasks: BTreeMap::new(),
            shown: None,
            dirty: false,
        }));
        let weak = Arc::downgrade(&board);
        thread::spawn(move || keep_talking(&weak));
        Self(board)
    }

    /// Says where `task` is now.
    pub(crate) fn update(&self, task: &str, state: String) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = board.tasks.insert(task.to_owned(), state).is_none();
        if new || board.is_due() {
            board.draw();
        }
    }

    /// Takes `task` off the board and leaves a line that says how it ended.
    pub(crate) fn finish(&self, task: &str, how: &str) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.tasks.remove(task);
        board.line(&format!("{task}: {how}"));
    }

    /// Takes `task` off the board without a word.
    pub(crate) fn forget(&self, task: &str) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.tasks.remove(task);
    }

    /// A line of its own, above the status.
    pub(crate) fn say(&self, text: &str) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.line(text);
    }
}

/// Says again where things are while a task is silent (a compiler, say).
fn keep_talking(board: &Weak<Mutex<Board>>) {
    while let Some(board) = board.upgrade() {
        let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
        if !board.tasks.is_empty() && board.is_due() {
            board.draw();
        }
        drop(board);
        thread::sleep(Duration::from_secs(1));
    }
}

impl Board {
    fn is_due(&self) -> bool {
        let interval = if self.terminal {
            REDRAW_INTERVAL
        } else {
            PLAIN_INTERVAL
        };
        self.shown.is_none_or(|shown| shown.elapsed() >= interval)
    }

    fn draw(&mut self) {
        let tasks: Vec<String> = self
            .tasks
            .iter()
            .map(|(task, state)| format!("{task} {state}"))
            .collect();
        let text = format!("[{}] {}", clock(self.start.elapsed()), tasks.join(" | "));
        self.shown = Some(Instant::now());
        let mut err = std::io::stderr().lock();
        // A closed stderr is no reason to stop working.
        let _ = if self.terminal {
            self.dirty = true;
            write!(err, "\r\x1b[K{text}")
        } else {
            writeln!(err, "{text}")
        };
        let _ = err.flush();
    }

    fn line(&mut self, text: &str) {
        let mut err = std::io::stderr().lock();
        if std::mem::take(&mut self.dirty) {
            let _ = write!(err, "\r\x1b[K");
        }
        let _ = writeln!(err, "{text}");
    }
}

/// A duration as people say it: `4.2 s`, `3 min 05 s`.
pub(crate) fn clock(elapsed: Duration) -> String {
    let secs = elapsed.as_secs();
    if secs < 60 {
        format!("{:.1} s", elapsed.as_secs_f64())
    } else {
        format!("{} min {:02} s", secs / 60, secs % 60)
    }
}

/// One line on stderr.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
