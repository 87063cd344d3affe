//! What the tests share: an archive writer, an image builder, and a reader of EROFS.

pub(crate) mod erofs;
pub(crate) mod image;
pub(crate) mod registry;
pub(crate) mod tarball;

pub(crate) use erofs::read_erofs;
pub(crate) use image::{Layout, apply, apply_with, digest, gzip};
pub(crate) use tarball::{Entry, Tar};

/// Prints why a test cannot run here.
pub(crate) fn skipped(why: &str) {
    println!("skipped: {why}");
}

/// Whether a program is on the search path.
pub(crate) fn have(program: &str) -> bool {
    std::process::Command::new("sh")
        .args(["-c", &format!("command -v {program} >/dev/null 2>&1")])
        .status()
        .is_ok_and(|s| s.success())
}

/// Runs a command and fails the test, with its output, unless it succeeds.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let out = std::process::Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(out.status.success(), "{program} {args:?}: {text}");
    text
}
