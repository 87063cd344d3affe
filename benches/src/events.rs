//! What the engine's crates log, for measurements that read it.

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Takes in what is logged for one target.
pub(crate) trait Listen: Send + Sync + 'static {
    /// Of events with another target nothing is heard; those below it are.
    const TARGET: &'static str;

    fn hear(&self, event: &Event<'_>);
}

/// A subscriber with one listener, which cares for no spans.
pub(crate) struct Listening<L>(pub(crate) L);

impl<L: Listen> Subscriber for Listening<L> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with(L::TARGET)
    }

    fn event(&self, event: &Event<'_>) {
        self.0.hear(event);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
