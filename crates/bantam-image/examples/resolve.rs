//! Makes an image ready and says where it is: `resolve STORE SOURCE`. Prints time and peak memory.

#![allow(clippy::print_stdout)]

use std::path::Path;
use std::time::Instant;

use bantam_image::{Error, ImageSource, NoProgress, ResolveOptions, Store};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let (Some(store), Some(source)) = (args.next(), args.next()) else {
        println!("usage: resolve STORE SOURCE");
        return Ok(());
    };
    let start = Instant::now();
    let source = ImageSource::parse(&source)?;
    let image = Store::open(Path::new(&store))?.resolve(
        &source,
        &ResolveOptions::default(),
        &NoProgress,
    )?;
    println!("{image:#?}");
    println!("took {:?}", start.elapsed());
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        let peak = status.lines().find(|line| line.starts_with("VmHWM"));
        println!("{}", peak.unwrap_or_default());
    }
    Ok(())
}
