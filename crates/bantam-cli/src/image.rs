//! `bantam image`: the images of this host's store.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use bantam::{
    BlobInfo, ImageDetails, ImageSource, Images, Loaded, Platform, Reference, ResolveOptions,
    StoredImage, Usage,
};
use clap::{Args, Subcommand};
use indicatif::HumanBytes;

use crate::args::Global;
use crate::failure::Failure;
use crate::show::{ago, columns, json, out, printable, raw_stdout, say};
use crate::{Outcome, progress};

/// What may stand for an image of the store.
const NAMES: &str = "\
REF is a reference such as debian:12, a digest, or the first digits of a digest (6 at least).";

#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum ImageCommand {
    /// Fetch images from their registries, ready to boot
    Pull(PullArgs),
    /// List the images of the store (with -q, their digests only)
    Ls(LsArgs),
    /// Show what an image holds and runs
    Inspect(InspectArgs),
    /// Remove images, or names of images that have others
    Rm(RmArgs),
    /// Remove images that no name means, layers that no image uses, and unfinished pulls
    Prune(PruneArgs),
    /// Put the images of an archive into the store
    Load(LoadArgs),
    /// Write an image as an OCI archive
    Save(SaveArgs),
}

impl ImageCommand {
    /// Whether the result is JSON.
    pub(crate) fn json(&self) -> bool {
        match self {
            Self::Ls(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Prune(args) => args.json,
            Self::Pull(_) | Self::Rm(_) | Self::Load(_) | Self::Save(_) => false,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "\
Prints the full reference of each image, with its digest. Layers that are in the store are not
fetched again; a tag that moved is.")]
pub(crate) struct PullArgs {
    /// Image references, such as debian:12 or ghcr.io/org/app@sha256:...
    #[arg(required = true, value_name = "REF", value_parser = Reference::parse)]
    references: Vec<Reference>,
    /// Platform to choose from an image of several, such as linux/arm64
    #[arg(long, alias = "oci-platform", value_name = "OS/ARCH", value_parser = Platform::parse)]
    platform: Option<Platform>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
SIZE is the disk space of an image: the file system that machines boot from and the layers it was
made from. SHARED is the part of it that other images use as well. Layers are kept so that they
need not be fetched again and images can be saved. The total counts everything once.")]
pub(crate) struct LsArgs {
    /// A JSON array instead of a table; sizes in bytes, times in unix seconds
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = NAMES)]
pub(crate) struct InspectArgs {
    /// The image
    #[arg(value_name = "REF")]
    name: String,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
REF is a reference such as debian:12, a digest, or the first digits of a digest (6 at least). A
reference takes the image with it if it was the last; a digest takes all references. An image that
a machine uses is not removed.")]
pub(crate) struct RmArgs {
    /// The images
    #[arg(required = true, value_name = "REF")]
    names: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Images that were run from archives and directories have no name: they go, and are made again when
they are run again. An image that a machine uses stays.")]
pub(crate) struct PruneArgs {
    /// Every image that no machine uses
    #[arg(short, long)]
    all: bool,
    /// One JSON object instead of text; sizes in bytes
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Takes OCI archives, what `docker save` writes, plain or compressed, and layout directories. Prints
the full reference of each image, with its digest.")]
pub(crate) struct LoadArgs {
    /// The archive; - for standard input
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    input: String,
    /// Name the image so, whatever the archive calls it
    #[arg(long, value_name = "REF", value_parser = Reference::parse)]
    name: Option<Reference>,
    /// Load only the image that the archive calls NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Platform to choose from an image of several, such as linux/arm64
    #[arg(long, alias = "oci-platform", value_name = "OS/ARCH", value_parser = Platform::parse)]
    platform: Option<Platform>,
}

#[derive(Debug, Args)]
#[command(after_help = NAMES)]
pub(crate) struct SaveArgs {
    /// The image
    #[arg(value_name = "REF")]
    name: String,
    /// The archive to write; - for standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

pub(crate) fn image(global: &Global, command: ImageCommand) -> Outcome {
    let images = Images::open(&global.home()?)?;
    match command {
        ImageCommand::Pull(args) => pull(global, &images, args),
        ImageCommand::Ls(args) => ls(global, &images, &args),
        ImageCommand::Inspect(args) => inspect(&images, &args),
        ImageCommand::Rm(args) => rm(global, &images, &args),
        ImageCommand::Prune(args) => prune(global, &images, &args),
        ImageCommand::Load(args) => load(global, &images, args),
        ImageCommand::Save(args) => save(&images, &args),
    }
}

fn pull(global: &Global, images: &Images, args: PullArgs) -> Outcome {
    let options = ResolveOptions {
        platform: args.platform.unwrap_or_default(),
        registries: global.registries(),
        ..ResolveOptions::default()
    };
    for reference in &args.references {
        let reporter = progress::reporter(global.quiet);
        let image = images.pull(reference, &options, reporter.as_ref())?;
        out(&format!("{}\n", pinned(reference, &image.digest)))?;
    }
    Ok(0)
}

fn load(global: &Global, images: &Images, args: LoadArgs) -> Outcome {
    if args.input == "-" && io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "standard input is a terminal: name an archive with -i FILE".into(),
        ));
    }
    let is_special = args.input == "-" || args.input.starts_with(['/', '.']);
    // Here every name is a path, with or without a slash in it.
    let source = ImageSource::parse(&if is_special {
        args.input
    } else {
        format!("./{}", args.input)
    })
    .map_err(bantam::Error::from)?;
    let options = ResolveOptions {
        platform: args.platform.unwrap_or_default(),
        ref_name: args.only,
        registries: global.registries(),
        ..ResolveOptions::default()
    };
    let reporter = progress::reporter(global.quiet);
    let loaded = images.load(&source, args.name.as_ref(), &options, reporter.as_ref())?;
    for Loaded { image, names } in &loaded {
        if names.is_empty() {
            out(&format!("{}\n", image.digest))?;
        }
        for name in names {
            out(&format!("{}\n", pinned(name, &image.digest)))?;
        }
    }
    Ok(0)
}

/// A reference to exactly this image, for people and for scripts.
fn pinned(reference: &Reference, digest: &str) -> String {
    match reference.digest() {
        Some(_) => reference.to_string(),
        None => format!("{reference}@{digest}"),
    }
}

fn save(images: &Images, args: &SaveArgs) -> Outcome {
    if args.output.as_os_str() != "-" {
        images.save_file(&args.name, &args.output)?;
        return Ok(0);
    }
    let mut stdout = raw_stdout()?;
    if stdout.is_terminal() {
        return Err(Failure::Usage(
            "standard output is a terminal: name a file with -o FILE".into(),
        ));
    }
    images.save(&args.name, &mut stdout)?;
    Ok(0)
}

fn ls(global: &Global, images: &Images, args: &LsArgs) -> Outcome {
    let list = images.list()?;
    if args.json {
        return json(&list);
    }
    if global.quiet {
        let digests = list.iter().map(|image| format!("{}\n", image.digest));
        out(&digests.collect::<String>())?;
        return Ok(0);
    }
    out(&table(&list))?;
    if !list.is_empty() {
        // Talk, not data: the table stays a table.
        let _ = writeln!(io::stderr(), "{}", total(&list, &images.usage()?));
    }
    Ok(0)
}

fn table(list: &[StoredImage]) -> String {
    let mut rows =
        vec![["REFERENCE", "DIGEST", "PLATFORM", "SIZE", "SHARED", "ADDED"].map(str::to_owned)];
    for image in list {
        let row = |name: &str| {
            [
                printable(name),
                short(&image.digest).to_owned(),
                printable(&image.platform),
                HumanBytes(image.bytes()).to_string(),
                HumanBytes(image.shared_bytes).to_string(),
                ago(image.added_at),
            ]
        };
        if image.names.is_empty() {
            rows.push(row("<none>"));
        }
        rows.extend(image.names.iter().map(|name| row(name)));
    }
    columns(&rows)
}

fn total(list: &[StoredImage], usage: &Usage) -> String {
    let plural = if list.len() == 1 { "" } else { "s" };
    let mut text = format!(
        "{} image{plural}, {} on disk: {} to boot from, {} layers",
        list.len(),
        HumanBytes(usage.bytes()),
        HumanBytes(usage.rootfs_bytes),
        HumanBytes(usage.blob_bytes),
    );
    let unused = usage
        .unused_blob_bytes
        .saturating_add(usage.unfinished_bytes);
    if unused > 0 {
        // Writing to a String cannot fail.
        let _ = write!(text, ", {} unused", HumanBytes(unused));
    }
    text
}

fn rm(global: &Global, images: &Images, args: &RmArgs) -> Outcome {
    let reporter = progress::reporter(global.quiet);
    let mut freed = 0_u64;
    for name in &args.names {
        let removed = images.remove(name, reporter.as_ref())?;
        let mut text = String::new();
        for name in &removed.names {
            text.push_str(&format!("untagged {}\n", printable(name)));
        }
        for digest in &removed.images {
            text.push_str(&format!("removed {digest}\n"));
        }
        out(&text)?;
        freed = freed.saturating_add(removed.bytes_freed);
    }
    say(global, &format!("freed {}", HumanBytes(freed)));
    Ok(0)
}

fn prune(global: &Global, images: &Images, args: &PruneArgs) -> Outcome {
    let reporter = progress::reporter(global.quiet);
    let pruned = images.prune(args.all, reporter.as_ref())?;
    if args.json {
        return json(&pruned);
    }
    let mut text = String::new();
    for name in &pruned.names {
        text.push_str(&format!("untagged {}\n", printable(name)));
    }
    for digest in &pruned.images {
        text.push_str(&format!("removed {digest}\n"));
    }
    out(&text)?;
    for digest in &pruned.in_use {
        say(global, &format!("kept {digest}: in use"));
    }
    let (blobs, freed) = (pruned.blobs, HumanBytes(pruned.bytes_freed));
    say(global, &format!("removed {blobs} blobs, freed {freed}"));
    Ok(0)
}

fn inspect(images: &Images, args: &InspectArgs) -> Outcome {
    let details = images.inspect(&args.name)?;
    if args.json {
        return json(&details);
    }
    out(&details_text(&details))?;
    Ok(0)
}

fn details_text(details: &ImageDetails) -> String {
    let (image, config) = (&details.image, &details.config);
    let one = |value: &Option<String>| value.iter().cloned().collect();
    let blob = |blob: &BlobInfo| format!("{} {}", blob.digest, HumanBytes(blob.size));
    let mut layers_on_disk = Vec::new();
    if image.blob_bytes > 0 {
        let (all, shared) = (HumanBytes(image.blob_bytes), HumanBytes(image.shared_bytes));
        layers_on_disk.push(format!("{all} ({shared} shared)"));
    }
    let facts: [(&str, Vec<String>); 21] = [
        ("Digest", vec![image.digest.clone()]),
        ("References", image.names.clone()),
        ("Sources", details.sources.clone()),
        ("Platform", vec![image.platform.clone()]),
        ("Created", one(&details.created)),
        ("Added", vec![ago(image.added_at)]),
        (
            "Root file system",
            vec![HumanBytes(image.rootfs_bytes).to_string()],
        ),
        ("Layers on disk", layers_on_disk),
        ("Pinned by", image.pinned_by.clone()),
        ("User", one(&config.user)),
        ("Working directory", one(&config.working_dir)),
        ("Entrypoint", words(&config.entrypoint)),
        ("Command", words(&config.cmd)),
        ("Stop signal", one(&config.stop_signal)),
        ("Environment", config.env.clone()),
        ("Ports", config.exposed_ports.clone()),
        ("Volumes", config.volumes.clone()),
        (
            "Labels",
            config
                .labels
                .iter()
                .map(|(k, v)| format!("{k}={v}"))
                .collect(),
        ),
        ("Manifest", details.manifest.iter().map(blob).collect()),
        (
            "Configuration",
            details.config_blob.iter().map(blob).collect(),
        ),
        ("Layers", details.layers.iter().map(blob).collect()),
    ];
    let mut rows = Vec::new();
    for (name, values) in facts {
        let mut label = format!("{name}:");
        for value in values {
            rows.push([std::mem::take(&mut label), printable(&value)]);
        }
    }
    columns(&rows)
}

/// Words as JSON, which shows where each begins and ends.
fn words(words: &[String]) -> Vec<String> {
    let shown = (!words.is_empty()).then(|| serde_json::to_string(words));
    shown
        .map(|text| text.unwrap_or_else(|_| words.join(" ")))
        .into_iter()
        .collect()
}

/// The first digits of a digest, enough for a person.
fn short(digest: &str) -> &str {
    let hex = digest.split_once(':').map_or(digest, |(_, hex)| hex);
    hex.get(..12).unwrap_or(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_nothing_is_its_header() {
        assert_eq!(
            table(&[]),
            "REFERENCE  DIGEST  PLATFORM  SIZE  SHARED  ADDED\n"
        );
    }

    #[test]
    fn words_cannot_drive_the_terminal() {
        assert_eq!(words(&["\u{1b}[0m".into()]), [r#"["\u001b[0m"]"#]);
    }
}
