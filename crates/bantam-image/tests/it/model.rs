//! Random layers against a simple model: a flat map from paths to files.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::common::{Entry, Tar, apply};

type Path = Vec<&'static str>;

#[derive(Clone, Debug)]
enum Op {
    File(Path, u8),
    Dir(Path, u32),
    Symlink(Path, bool, Path),
    HardLink(Path, Path),
    Whiteout(Path),
    Opaque(Path),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    File(u8),
    Dir(u32),
    Symlink(bool, Path),
}

/// A path's file (by number, as several paths may share one) and the layer that says so. A directory also has the
/// layer that last put something below it; that makes it exist in that layer.
#[derive(Clone, Debug)]
struct At {
    file: usize,
    layer: usize,
    touched: usize,
}

#[derive(Clone, Default)]
struct Model {
    files: Vec<What>,
    paths: BTreeMap<Path, At>,
}

struct Refused;

impl Model {
    fn what(&self, path: &Path) -> Option<&What> {
        self.paths.get(path).map(|at| &self.files[at.file])
    }

    fn put(&mut self, path: &Path, what: What, layer: usize) {
        self.files.push(what);
        self.paths.retain(|p, _| !p.starts_with(path));
        self.paths.insert(
            path.clone(),
            At {
                file: self.files.len() - 1,
                layer,
                touched: layer,
            },
        );
    }

    /// Follows symlinks of a directory path. Missing directories are made if `make` says in which layer.
    fn dir(&mut self, path: &Path, make: Option<usize>) -> Result<Option<Path>, Refused> {
        let mut rest: Vec<&'static str> = path.iter().rev().copied().collect();
        let mut here = Path::new();
        let mut follows = 0;
        while let Some(name) = rest.pop() {
            if name == ".." {
                here.pop();
                continue;
            }
            here.push(name);
            match self.what(&here).cloned() {
                Some(What::Dir(_)) => {}
                Some(What::Symlink(absolute, target)) => {
                    follows += 1;
                    if follows > 40 {
                        return Err(Refused);
                    }
                    here.pop();
                    if absolute {
                        here.clear();
                    }
                    rest.extend(target.iter().rev());
                }
                _ => match make {
                    Some(layer) => self.put(&here.clone(), What::Dir(0o755), layer),
                    None => return Ok(None),
                },
            }
        }
        if let Some(layer) = make {
            for n in 1..=here.len() {
                self.paths.get_mut(&here[..n]).unwrap().touched = layer;
            }
        }
        Ok(Some(here))
    }

    /// Removes what lower layers have at and below `path`.
    fn hide(&mut self, path: &Path, below_only: bool, layer: usize) {
        let files = &mut self.files;
        self.paths.retain(|p, at| {
            if !p.starts_with(path) || below_only && p == path {
                return true;
            }
            match &mut files[at.file] {
                What::Dir(mode) if at.touched == layer => {
                    if at.layer < layer {
                        *mode = 0o755;
                        at.layer = layer;
                    }
                    true
                }
                What::Dir(_) => false,
                _ => at.layer == layer,
            }
        });
    }

    fn apply(&mut self, op: &Op, layer: usize) -> Result<(), Refused> {
        let place = |model: &mut Self, path: &Path| {
            let (name, parent) = path.split_last().unwrap();
            let mut full = model.dir(&parent.to_vec(), Some(layer))?.unwrap();
            full.push(name);
            Ok(full)
        };
        match op {
            Op::File(path, content) => {
                let path = place(self, path)?;
                self.put(&path, What::File(*content), layer);
            }
            Op::Symlink(path, absolute, target) => {
                let path = place(self, path)?;
                self.put(&path, What::Symlink(*absolute, target.clone()), layer);
            }
            Op::Dir(path, mode) => {
                let path = place(self, path)?;
                if let Some(What::Dir(_)) = self.what(&path) {
                    self.files.push(What::Dir(*mode));
                    let file = self.files.len() - 1;
                    self.paths.insert(
                        path,
                        At {
                            file,
                            layer,
                            touched: layer,
                        },
                    );
                } else {
                    self.put(&path, What::Dir(*mode), layer);
                }
            }
            Op::HardLink(path, target) => {
                let path = place(self, path)?;
                let (name, parent) = target.split_last().unwrap();
                let mut target = self.dir(&parent.to_vec(), None)?.ok_or(Refused)?;
                target.push(name);
                if matches!(self.what(&target), None | Some(What::Dir(_))) {
                    return Err(Refused);
                }
                let file = self.paths[&target].file;
                self.paths.retain(|p, _| !p.starts_with(&path));
                self.paths.insert(
                    path,
                    At {
                        file,
                        layer,
                        touched: layer,
                    },
                );
            }
            Op::Whiteout(path) => {
                let (name, parent) = path.split_last().unwrap();
                if let Some(mut full) = self.dir(&parent.to_vec(), None)? {
                    full.push(name);
                    self.hide(&full, false, layer);
                }
            }
            Op::Opaque(path) => {
                if let Some(full) = self.dir(path, None)? {
                    self.hide(&full, true, layer);
                }
            }
        }
        Ok(())
    }
}

fn text(path: &[&str]) -> String {
    path.join("/")
}

fn write(tar: Tar, op: &Op) -> Tar {
    match op {
        Op::File(path, content) => tar.file(text(path), vec![*content; usize::from(*content) * 97]),
        Op::Dir(path, mode) => tar.entry(&Entry {
            mode: *mode,
            ..Entry::new(b'5', text(path))
        }),
        Op::Symlink(path, absolute, target) => tar.symlink(
            text(path),
            format!("{}{}", if *absolute { "/" } else { "" }, text(target)),
        ),
        Op::HardLink(path, target) => tar.hard_link(text(path), text(target)),
        Op::Whiteout(path) => tar.whiteout(&text(path)),
        Op::Opaque(path) => tar.opaque(&text(path)),
    }
}

fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
}

fn target() -> impl Strategy<Value = Path> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c", ".."]), 1..4)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (path(), any::<u8>()).prop_map(|(p, c)| Op::File(p, c)),
        3 => (path(), 0_u32..0o1000).prop_map(|(p, m)| Op::Dir(p, m)),
        2 => (path(), any::<bool>(), target()).prop_map(|(p, a, t)| Op::Symlink(p, a, t)),
        2 => (path(), path()).prop_map(|(p, t)| Op::HardLink(p, t)),
        2 => path().prop_map(Op::Whiteout),
        1 => path().prop_map(Op::Opaque),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layers_give_what_the_model_gives(layers in prop::collection::vec(prop::collection::vec(op(), 0..9), 1..4)) {
        // What the model refuses is left out, and must be refused by itself too.
        let mut model = Model::default();
        let mut tars = Vec::new();
        let mut refused = None;
        for (layer, ops) in layers.iter().enumerate() {
            tars.push(Tar::new());
            for op in ops {
                let mut next = model.clone();
                if next.apply(op, layer + 1).is_ok() {
                    model = next;
                    let tar = tars.pop().unwrap_or_default();
                    tars.push(write(tar, op));
                } else if refused.is_none() {
                    let mut with = tars.clone();
                    let tar = with.pop().unwrap_or_default();
                    with.push(write(tar, op));
                    refused = Some(with);
                }
            }
        }
        if let Some(refused) = refused {
            prop_assert!(apply(&refused).is_err());
        }
        let files = match apply(&tars) {
            Ok(files) => files,
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let want: Vec<String> = model.paths.keys().map(|p| text(p)).collect();
        let mut got: Vec<String> = files.keys().filter(|p| !p.is_empty()).cloned().collect();
        // The model sorts by component, the image by whole path.
        let mut want_sorted = want.clone();
        want_sorted.sort();
        got.sort();
        prop_assert_eq!(got, want_sorted);
        let mut numbers: BTreeMap<usize, u64> = BTreeMap::new();
        for (path, at) in &model.paths {
            let node = &files[&text(path)];
            match &model.files[at.file] {
                What::File(content) => {
                    prop_assert_eq!(node.kind(), 0o100_000);
                    prop_assert_eq!(&node.data, &vec![*content; usize::from(*content) * 97]);
                }
                What::Dir(mode) => prop_assert_eq!(node.mode, 0o040_000 | mode),
                What::Symlink(absolute, target) => {
                    let slash = if *absolute { "/" } else { "" };
                    prop_assert_eq!(node.text(), format!("{slash}{}", text(target)));
                }
            }
            // Paths that share a file share an inode, and others do not.
            let nid = *numbers.entry(at.file).or_insert(node.nid);
            prop_assert_eq!(nid, node.nid);
        }
        let mut distinct: Vec<u64> = numbers.values().copied().collect();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assert_eq!(distinct.len(), numbers.len());
    }
}

/// An archive with an entry of every kind, and where its headers are.
fn everything() -> (Vec<u8>, Vec<usize>) {
    let long = "n".repeat(150);
    let mut mapped = b"1\n0\n4\n".to_vec();
    mapped.resize(512, 0);
    mapped.extend_from_slice(b"data");
    let tar = Tar::new()
        .dir("d/")
        .file("d/f", vec![7; 700])
        .pax(&[
            ("path", b"d/pax"),
            ("SCHILY.xattr.user.a", b"v"),
            ("mtime", b"1.5"),
            ("size", b"3"),
        ])
        .file("x", "abc")
        .gnu_long(b'L', &long)
        .gnu_long(b'K', &long)
        .symlink("s", "t")
        .hard_link("h", "d/f")
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.realsize", b"9000"),
        ])
        .file("sparse", &mapped)
        .entry(&Entry {
            device: (1, 3),
            ..Entry::new(b'3', "null")
        })
        .whiteout("d/f")
        .opaque("d");
    let bytes = tar.finish();
    let headers = (0..bytes.len())
        .step_by(512)
        .filter(|at| &bytes[at + 257..at + 262] == b"ustar")
        .collect();
    (bytes, headers)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any answer will do, as long as there is one.
    #[test]
    fn altered_archives_are_read_or_refused(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0_usize..512, any::<u8>()), 1..6)) {
        let (mut bytes, headers) = everything();
        for (which, in_header, offset, value) in changes {
            let at = if in_header { headers[which.index(headers.len())] + offset } else { which.index(bytes.len()) };
            bytes[at] = value;
        }
        // Checksums are put right, or hardly a change would get any further.
        for at in headers {
            bytes[at + 148..at + 156].fill(b' ');
            let sum: u32 = bytes[at..at + 512].iter().map(|b| u32::from(*b)).sum();
            bytes[at + 148..at + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let _ = apply(&[Tar(bytes)]);
    }
}
