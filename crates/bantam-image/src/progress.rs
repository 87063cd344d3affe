//! What a caller can watch while an image is made ready.

/// What is being done with a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its blob is being fetched from a registry.
    Download,
    /// It is being applied to the file system.
    Apply,
}

/// One layer, as progress reports name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its place in the image, from the bottom, starting at 0.
    pub index: usize,
    /// Its digest as far as known, for display.
    pub digest: String,
    /// The number of bytes that will be read (compressed).
    pub size: u64,
}

/// Receives progress. Calls come from several threads, and often: keep them cheap.
///
/// Every method does nothing unless overridden.
pub trait Progress: Sync {
    /// A stage begins for a layer.
    fn layer_started(&self, stage: Stage, layer: &Layer) {
        let _ = (stage, layer);
    }
    /// `bytes` more (compressed) bytes of the layer are done.
    fn layer_advanced(&self, stage: Stage, layer: &Layer, bytes: u64) {
        let _ = (stage, layer, bytes);
    }
    /// A stage ended well for a layer.
    fn layer_finished(&self, stage: Stage, layer: &Layer) {
        let _ = (stage, layer);
    }
    /// Something a person may want to read.
    fn message(&self, text: &str) {
        let _ = text;
    }
}

/// Ignores all progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}
