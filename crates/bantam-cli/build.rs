//! Links the unwinder into the program.
//!
//! Rust's standard library takes it from `libgcc_s.so.1`, for which the dynamic linker works a tenth of
//! the time that the program takes to `main`. The static library has the same code. Where it is not
//! found, or for another target than this host, all stays as it was.

use std::env::var;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=PATH");
    let native = var("TARGET").is_ok_and(|target| var("HOST").is_ok_and(|host| host == target));
    let gnu = var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux")
        && var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "gnu");
    if !native || !gnu {
        return;
    }
    let asked = Command::new("cc")
        .arg("-print-file-name=libgcc_eh.a")
        .output();
    let Ok(asked) = asked else {
        return;
    };
    let answer = String::from_utf8_lossy(&asked.stdout);
    // A compiler that has none answers with the bare name.
    let file = Path::new(answer.trim());
    if let Some(dir) = file.parent().filter(|dir| dir.is_absolute()) {
        // Another compiler has it in another folder.
        println!("cargo:rerun-if-changed={}", file.display());
        println!("cargo:rustc-link-search=native={}", dir.display());
        println!("cargo:rustc-link-lib=static=gcc_eh");
    }
}
