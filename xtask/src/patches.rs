//! The project's own patches of a kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;

/// Patches of a folder, in the order of their names.
#[derive(Default)]
pub(crate) struct Patches(Vec<Patch>);

struct Patch {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Patches {
    /// Reads all of `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(folder).map_err(Error::file("reading", folder))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(Error::file("reading", folder))?.path();
            if path.extension().is_some_and(|name| name == "patch") {
                paths.push(path);
            }
        }
        paths.sort();
        let patches = paths.into_iter().map(|path| {
            let bytes = host::read(&path)?;
            Ok(Patch { path, bytes })
        });
        patches.collect::<Result<_>>().map(Self)
    }

    /// What a kernel's name in the cache depends on: not the words before a patch.
    pub(crate) fn key(&self) -> String {
        let changes = |patch: &Patch| {
            let start = patch.bytes.windows(5).position(|at| at == b"\n--- ");
            let bytes = &patch.bytes[start.unwrap_or_default()..];
            format!("\n{}", host::sha256(bytes))
        };
        self.0.iter().map(changes).collect()
    }

    /// Applies them to a freshly unpacked `tree` of `source`.
    pub(crate) fn apply(&self, tree: &Path, source: &str) -> Result<()> {
        for patch in &self.0 {
            let mut command = Command::new("patch");
            command
                .current_dir(tree)
                .args(["--strip=1", "--forward", "--no-backup-if-mismatch"])
                .arg("--input")
                .arg(&patch.path);
            host::run_quiet(&mut command).map_err(|error| {
                Error::other(format!(
                    "{} does not apply to {source} (unpacked in {}): change it so that it does, \
                     or delete it; its head says what would be lost\n{error}",
                    patch.path.display(),
                    tree.display()
                ))
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str = "Why.\n--- a/file\n+++ b/file\n@@ -1 +1 @@\n-old\n+new\n";

    fn folder(name: &str, patches: &[(&str, &str)]) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("patches-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("file"), "old\n").unwrap();
        for (name, text) in patches {
            std::fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn patches_apply_in_the_order_of_their_names() {
        let second = PATCH.replace("new", "newest").replace("-old", "-new");
        let folder = folder("order", &[("2.patch", &second), ("1.patch", PATCH)]);
        Patches::read(&folder)
            .unwrap()
            .apply(&folder, "a source")
            .unwrap();
        let text = std::fs::read_to_string(folder.join("file")).unwrap();
        assert_eq!(text, "newest\n");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_patch_that_does_not_apply_is_named() {
        let folder = folder("named", &[("1.patch", &PATCH.replace("-old", "-other"))]);
        let error = Patches::read(&folder)
            .unwrap()
            .apply(&folder, "linux 9")
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("1.patch does not apply to linux 9"), "{text}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_changed_patch_makes_another_kernel_and_other_words_do_not() {
        let folder = folder("key", &[("1.patch", PATCH)]);
        let before = Patches::read(&folder).unwrap().key();
        std::fs::write(folder.join("1.patch"), PATCH.replace("Why", "What")).unwrap();
        assert_eq!(before, Patches::read(&folder).unwrap().key());
        std::fs::write(folder.join("1.patch"), PATCH.replace("new", "newer")).unwrap();
        assert_ne!(before, Patches::read(&folder).unwrap().key());
        assert_eq!(Patches::default().key(), "");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
