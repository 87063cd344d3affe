//! The aarch64 guest. Only its memory layout exists so far.

pub mod layout;
