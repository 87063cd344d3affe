//! The bantam command-line program, a thin skin over the bantam library

fn main() {}
