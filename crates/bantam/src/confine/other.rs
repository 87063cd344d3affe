//! Hosts on which a process cannot give up anything yet.

use std::io;

use super::{Confinement, Grant};

pub(super) fn probe() -> Confinement {
    Confinement {
        files: false,
        system_calls: false,
    }
}

pub(crate) fn confine(_grants: &[Grant]) -> io::Result<Confinement> {
    Ok(probe())
}

pub(crate) fn start_no_more_programs() -> io::Result<()> {
    Ok(())
}
