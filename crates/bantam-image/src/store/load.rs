//! Images from archives and layouts into the store, with their blobs and names.

use std::fs::File;

use super::resolve::{Job, STDIN, stdin};
use super::{Image, ResolveOptions, Store, WorkDir};
use crate::error::{Error, Result};
use crate::layout::{self, DockerSave, Files, Layout, Opened, SavedLayers};
use crate::limits::MAX_LOADED_NAMES;
use crate::progress::Progress;
use crate::reference::Reference;
use crate::source::ImageSource;

/// An image that [`Store::load`] put into the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The image.
    pub image: Image,
    /// The names it now has, in full.
    pub names: Vec<Reference>,
}

impl Store {
    /// Puts the images of an archive or layout into the store with their blobs, under the names that the archive gives
    /// them, or under `name`. Then they resolve as if they had been pulled.
    ///
    /// An archive that names no image holds one; [`ResolveOptions::ref_name`] chooses one of several.
    ///
    /// # Errors
    /// [`Error::Limit`] for an archive of more than 1000 names of which none was chosen.
    /// [`Error::Unsupported`] for what is no archive or layout of images: a reference, a digest, a root directory.
    pub fn load(
        &self,
        source: &ImageSource,
        name: Option<&Reference>,
        options: &ResolveOptions,
        progress: &dyn Progress,
    ) -> Result<Vec<Loaded>> {
        let loader = Loader {
            job: Job::keeping(self, options, progress),
            chosen: options.ref_name.as_deref(),
            name,
            progress,
        };
        let work;
        let (file, what) = match source {
            ImageSource::OciLayoutDir(path) => return loader.layout(&layout::open_dir(path)),
            ImageSource::Archive(path) => (
                File::open(path).map_err(Error::path("open", path))?,
                path.display().to_string(),
            ),
            ImageSource::Stdin => (stdin()?, STDIN.to_owned()),
            ImageSource::Registry(_) | ImageSource::Stored(_) | ImageSource::RootDir(_) => {
                return Err(Error::Unsupported {
                    what: format!("loading {source}"),
                    why: "it is no archive and no layout of images".to_owned(),
                });
            }
        };
        work = WorkDir::new(&self.dir)?;
        match loader.job.recognise(file, &what, &work)? {
            Opened::Layout(layout) => loader.layout(&layout),
            Opened::DockerSave(archive) => loader.docker_save(&archive),
        }
    }
}

struct Loader<'a> {
    job: Job<'a>,
    /// The image to choose.
    chosen: Option<&'a str>,
    /// Its new name.
    name: Option<&'a Reference>,
    progress: &'a dyn Progress,
}

impl Loader<'_> {
    fn layout(&self, layout: &Layout<impl Files>) -> Result<Vec<Loaded>> {
        self.each(layout.names()?, |name| {
            let chosen = layout.choose(&self.job.wanted(name))?;
            let blobs = self.job.store.blobs();
            let keep = || blobs.keep_local(self.job.store.dir(), &chosen, layout);
            self.job.once(&chosen, layout, Some(&keep))
        })
    }

    fn docker_save(&self, archive: &DockerSave) -> Result<Vec<Loaded>> {
        self.each(archive.names()?, |name| {
            let (chosen, paths) = archive.choose(&self.job.wanted(name))?;
            let layers = SavedLayers {
                archive,
                paths: &paths,
            };
            let blobs = self.job.store.blobs();
            let keep = || blobs.keep_local(self.job.store.dir(), &chosen, &layers);
            self.job.once(&chosen, &layers, Some(&keep))
        })
    }

    /// Loads the image of each name and names it in the store.
    fn each(
        &self,
        names: Vec<String>,
        load: impl Fn(Option<&str>) -> Result<Image>,
    ) -> Result<Vec<Loaded>> {
        let wanted: Vec<Option<&str>> = match self.chosen {
            Some(name) => vec![Some(name)],
            None if names.is_empty() => vec![None],
            None => names.iter().map(|name| Some(name.as_str())).collect(),
        };
        if wanted.len() > 1 && self.name.is_some() {
            return Err(Error::Ambiguous {
                source_name: "the archive".to_owned(),
                names,
            });
        }
        if wanted.len() > MAX_LOADED_NAMES {
            return Err(Error::Limit {
                what: "the archive".to_owned(),
                limit: MAX_LOADED_NAMES as u64,
                unit: "names to load at once; choose an image by its name",
            });
        }
        let mut loaded: Vec<Loaded> = Vec::new();
        let mut failure = None;
        for name in wanted {
            let image = match load(name) {
                Ok(image) => image,
                // Others may be for this platform.
                Err(error @ Error::NoPlatform { .. }) => {
                    failure = failure.or(Some(error));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let reference = match (self.name, name) {
                (Some(name), _) => Some(name.clone()),
                (None, Some(name)) => self.reference(name),
                (None, None) => None,
            };
            if let Some(reference) = &reference {
                let key = self.job.key(reference);
                self.job.store.remember("refs", &key, &image.digest)?;
            }
            match loaded.iter_mut().find(|other| other.image == image) {
                Some(other) => other.names.extend(reference),
                None => loaded.push(Loaded {
                    image,
                    names: reference.into_iter().collect(),
                }),
            }
        }
        match failure {
            Some(error) if loaded.is_empty() => Err(error),
            Some(error) => {
                self.progress.message(&format!("left out: {error}"));
                Ok(loaded)
            }
            None => Ok(loaded),
        }
    }

    /// What an archive's name means here. Layouts often hold a bare tag instead, which names no image.
    fn reference(&self, name: &str) -> Option<Reference> {
        let reference = Reference::parse(name)
            .ok()
            .filter(|reference| name.contains(['/', ':']) && reference.digest().is_none());
        if reference.is_none() {
            self.progress.message(&format!(
                "the archive's name {name:?} is no image reference"
            ));
        }
        reference
    }
}
