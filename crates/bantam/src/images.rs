//! The images of this host's store.

use std::io::Write;
use std::path::Path;

use bantam_image::{
    Image, ImageDetails, ImageSource, Loaded, Progress, Pruned, Reference, Removed, ResolveOptions,
    Store, StoredImage, Usage,
};

use crate::{Error, Home};

/// The images that this user's machines start from.
///
/// Every process of the user may work on them at the same time. An [`Image`] that someone holds,
/// a running [`Machine`](crate::Machine) for one, is not removed.
///
/// Where a method takes a `name`, it is a reference, a digest, or the first digits of a digest.
///
/// ```no_run
/// use bantam::{Home, Images, NoProgress, Reference, ResolveOptions};
///
/// let images = Images::open(&Home::from_env()?)?;
/// let reference = Reference::parse("alpine:3.20")?;
/// let image = images.pull(&reference, &ResolveOptions::default(), &NoProgress)?;
/// println!("{} takes {} bytes", image.digest, images.inspect("alpine:3.20")?.image.bytes());
/// images.save_file("alpine:3.20", "alpine.tar".as_ref())?;
/// # Ok::<(), bantam::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Images(Store);

impl Images {
    /// The store of a home. It need not exist: it is made when something is stored.
    ///
    /// # Errors
    /// [`Error::Image`] if something else is in its place.
    pub fn open(home: &Home) -> Result<Self, Error> {
        Ok(Self(Store::open(home.images())?))
    }

    /// Asks the registry what `reference` means now and makes that image ready to boot.
    ///
    /// # Errors
    /// [`Error::Image`] says what failed.
    pub fn pull(
        &self,
        reference: &Reference,
        options: &ResolveOptions,
        progress: &dyn Progress,
    ) -> Result<Image, Error> {
        Ok(self.0.pull(reference, options, progress)?)
    }

    /// Puts the images of an archive or layout into the store, under the names that it gives them
    /// or under `name`.
    ///
    /// # Errors
    /// [`Error::Image`] says what failed.
    pub fn load(
        &self,
        source: &ImageSource,
        name: Option<&Reference>,
        options: &ResolveOptions,
        progress: &dyn Progress,
    ) -> Result<Vec<Loaded>, Error> {
        Ok(self.0.load(source, name, options, progress)?)
    }

    /// Writes an image as an archive of an OCI layout.
    ///
    /// # Errors
    /// [`Error::Image`], among others if the image's layers are not kept: see
    /// [`StoredImage::can_save`].
    pub fn save(&self, name: &str, out: &mut dyn Write) -> Result<(), Error> {
        Ok(self.0.save(name, out)?)
    }

    /// As [`Images::save`], into a file that appears when it is complete.
    ///
    /// # Errors
    /// As [`Images::save`].
    pub fn save_file(&self, name: &str, path: &Path) -> Result<(), Error> {
        Ok(self.0.save_file(name, path)?)
    }

    /// All images, the newest first.
    ///
    /// # Errors
    /// [`Error::Image`] if the store cannot be read.
    pub fn list(&self) -> Result<Vec<StoredImage>, Error> {
        Ok(self.0.list()?)
    }

    /// The disk space that the store takes, every blob counted once.
    ///
    /// # Errors
    /// [`Error::Image`] if the store cannot be read.
    pub fn usage(&self) -> Result<Usage, Error> {
        Ok(self.0.usage()?)
    }

    /// All about one image.
    ///
    /// # Errors
    /// [`Error::Image`] if there is none of that name.
    pub fn inspect(&self, name: &str) -> Result<ImageDetails, Error> {
        Ok(self.0.inspect(name)?)
    }

    /// Removes a name, and the image if that was its last; by digest, the image with all names.
    ///
    /// # Errors
    /// [`Error::Image`] if there is none of that name, or it is in use.
    pub fn remove(&self, name: &str, progress: &dyn Progress) -> Result<Removed, Error> {
        Ok(self.0.remove(name, progress)?)
    }

    /// Removes images without names, blobs without images and what killed processes left; with
    /// `all`, every image. What is in use stays.
    ///
    /// # Errors
    /// [`Error::Image`] if the store cannot be written.
    pub fn prune(&self, all: bool, progress: &dyn Progress) -> Result<Pruned, Error> {
        Ok(self.0.prune(all, progress)?)
    }

    /// Holds an image in the store for `owner` although no process uses it, until
    /// [`Images::unpin`]. An owner has one pin.
    ///
    /// # Errors
    /// [`Error::Image`] if the store cannot be written.
    pub fn pin(&self, image: &Image, owner: &str) -> Result<(), Error> {
        Ok(self.0.pin(image, owner)?)
    }

    /// Takes an owner's pin away, if it has one.
    ///
    /// # Errors
    /// [`Error::Image`] if the store cannot be written.
    pub fn unpin(&self, owner: &str) -> Result<(), Error> {
        Ok(self.0.unpin(owner)?)
    }
}
