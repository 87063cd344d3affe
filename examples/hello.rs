//! Runs a command in a microVM made from an image and prints what came of it.
//!
//! ```sh
//! cargo run -p bantam --example hello -- debian:12 uname -a
//! ```
//!
//! Needs the guest's files: `cargo xtask guest`, then `BANTAM_GUEST_DIR=target/guest`.
#![allow(clippy::print_stdout)] // an example talks

use std::time::Duration;

use bantam::{Error, Machine};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let image = args.next().unwrap_or_else(|| "debian:12".to_owned());
    let command: Vec<String> = match args.collect::<Vec<_>>() {
        none if none.is_empty() => vec!["uname".into(), "-a".into()],
        words => words,
    };

    let machine = Machine::builder().image(image).memory_mib(256).start()?;
    println!(
        "engine {}, kernel {}",
        machine.engine(),
        machine.kernel_release()
    );

    machine.write_file("/tmp/greeting", "hello from the host\n")?;
    let out = machine
        .exec(&command)
        .timeout(Duration::from_secs(60))
        .output()?;
    print!("{}", String::from_utf8_lossy(&out.stdout));
    print!("{}", String::from_utf8_lossy(&out.stderr));
    println!("exit code {}", out.status.exit_code());

    let report = machine.stop()?;
    println!("ended: {:?}", report.cause);
    Ok(())
}
