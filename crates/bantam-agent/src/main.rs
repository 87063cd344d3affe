//! PID 1 of a bantam guest

fn main() {}
