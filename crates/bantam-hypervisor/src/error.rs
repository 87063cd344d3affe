//! The crate's error type.

use std::io;

use crate::UnusableReason;

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// The host has no hypervisor that this process can use.
    #[error("opening the hypervisor failed: {0}")]
    Unavailable(UnusableReason),
    /// The hypervisor lacks something that bantam cannot do without.
    #[error("the hypervisor lacks {0}")]
    Missing(&'static str),
    /// A call into the hypervisor was refused.
    #[error("{what} failed")]
    Call {
        /// What was being done, with the address, slot, vCPU or register it was done to.
        what: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The caller asked for something that is wrong on any host.
    #[error("{what} is invalid: {why}")]
    Invalid {
        /// The argument.
        what: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A mock was asked for something that its script does not contain.
    #[error("the mock vCPU {0} has no scripted exit left")]
    ScriptEnded(u32),
}

impl HypervisorError {
    /// A refused call; `what` reads as the start of a sentence: "mapping slot 3".
    pub(crate) fn call(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Call {
            what: what.into(),
            source: source.into(),
        }
    }
}
