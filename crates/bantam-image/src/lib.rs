//! OCI images: references, registries, content store, and layers to one EROFS file system.
//!
//! [`Store::resolve`] takes what a user names ([`ImageSource`]) to an [`Image`]: a read-only EROFS file to boot from
//! and the image's configuration. The second time it finds both in the store and does nothing else.
//!
//! ```no_run
//! use bantam_image::{ImageSource, NoProgress, ResolveOptions, Store};
//!
//! let store = Store::open("/var/cache/images".as_ref())?;
//! let source = ImageSource::parse("python:3.12-slim")?;
//! let image = store.resolve(&source, &ResolveOptions::default(), &NoProgress)?;
//! println!("{} runs {:?}", image.rootfs.display(), image.config.process(&[], None));
//! # Ok::<(), bantam_image::Error>(())
//! ```
//!
//! # How a rootfs is made
//!
//! Nothing of an image ever touches the host's file system under a name of the image's choosing. Layers are applied,
//! bottom up, to a tree in memory ([`erofs::Tree`]) whose paths are keys of maps; file contents stream into the data
//! area of one file ([`erofs::DataArea`]); the tree is written behind them ([`erofs::write`]). So `..`, absolute names,
//! symlinks and hard links cannot lead anywhere but into the same tree, owners and device nodes need no privilege,
//! and memory holds names and attributes only, within [`Limits`].
//!
//! The choices that the specification leaves open:
//!
//! - A layer's entry below a symlink goes to the link's target inside the image, as usrmerge images need
//!   (`bin -> usr/bin`). Only a directory entry of the link's own name replaces the link.
//! - Whiteouts and opaque markers act on lower layers only, wherever in the layer they stand.
//! - `..` in an entry's name is resolved as text and stops at the root.
//! - Directories that no layer describes are 0755 and root's, with time 0.
//! - `trusted.overlay.*` attributes are dropped: in the guest they would be orders to overlayfs.
//! - PAX global headers are ignored. Unknown entry types are errors.
//!
//! # Dependencies
//!
//! The API blocks and needs no async runtime: registries are spoken to with ureq over rustls (ring), 36 crates and 54 s
//! to build where oci-client and tokio measured 149 crates and 189 s. Manifests and configurations are a few serde
//! structs rather than oci-spec's, because registries hold documents with null in nearly any field.

mod config;
mod convert;
mod credentials;
mod digest;
pub mod erofs;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod layer;
mod layout;
mod limits;
mod manifest;
mod platform;
mod progress;
mod reference;
mod registry;
mod rootdir;
mod source;
mod store;
mod sys;

pub use config::{Argv, DEFAULT_PATH, ImageConfig};
pub use credentials::Credential;
pub use digest::{Algorithm, Digest};
pub use error::{Error, Result};
pub use limits::Limits;
pub use platform::Platform;
pub use progress::{Layer, NoProgress, Progress, Stage};
pub use reference::{DOCKER_HUB, Reference};
pub use registry::{Registries, Timeouts};
pub use source::ImageSource;
pub use store::{
    BlobInfo, Image, ImageDetails, Loaded, Pruned, PullPolicy, Removed, ResolveOptions, Store,
    StoredImage, Usage,
};
