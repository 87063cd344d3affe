//! EROFS images of trees that the input describes, without archives.

use std::collections::BTreeMap;

use bantam_image::erofs::{Attributes, DataArea, InodeId, Kind, Tree, Xattrs, write};

use crate::Input;
use crate::image::{LIMITS, check, memory_file};

pub fn run(data: &[u8]) {
    // An operation that is refused ends the image; what was built so far need not be written then.
    let _ = build(data);
}

fn build(data: &[u8]) -> bantam_image::Result<()> {
    let mut input = Input(data);
    let mut tree = Tree::new(LIMITS);
    let mut area = DataArea::new(memory_file(), memory_file(), LIMITS.content_bytes);
    let mut dirs = vec![tree.root()];
    let mut files: Vec<InodeId> = Vec::new();
    let mut layer = 1;
    for _ in 0..LIMITS.entries {
        if input.is_empty() {
            break;
        }
        let dir = dirs[usize::from(input.byte()) % dirs.len()];
        let name = name(&mut input);
        // A directory that was removed with its parent is no longer one.
        if tree.is_dir(dir).ok() != Some(true) {
            continue;
        }
        match input.byte() % 8 {
            0 => {
                let attributes = attributes(&mut input);
                dirs.push(tree.insert_dir(dir, &name, attributes, layer)?);
            }
            1 | 2 => {
                let attributes = attributes(&mut input);
                let size = input.number() % (64 << 10);
                // Others than the file has, now and then, are refused in the end or do no harm.
                let others = Xattrs::default();
                let byte = input.byte();
                let xattrs = if byte > 250 { &others } else { &attributes.xattrs };
                let kind = Kind::File(contents(&mut area, size, xattrs, byte)?);
                files.push(tree.insert(dir, &name, attributes, kind, layer)?);
            }
            3 => {
                let kind = Kind::Symlink(vec![b't'; 1 + input.number() as usize % 4095].into());
                let attributes = attributes(&mut input);
                files.push(tree.insert(dir, &name, attributes, kind, layer)?);
            }
            4 => {
                let kind = match input.byte() % 4 {
                    0 => Kind::CharDevice(input.number() as u32),
                    1 => Kind::BlockDevice(input.number() as u32),
                    2 => Kind::Fifo,
                    _ => Kind::Socket,
                };
                let attributes = attributes(&mut input);
                tree.insert(dir, &name, attributes, kind, layer)?;
            }
            5 => {
                // As layers do it: to what a name of the tree leads to.
                let Some(found) = tree.lookup(dir, &name)? else {
                    continue;
                };
                let to = dirs[usize::from(input.byte()) % dirs.len()];
                if !tree.is_dir(found)? && tree.is_dir(to).ok() == Some(true) {
                    let as_name = self::name(&mut input);
                    tree.link(to, &as_name, found, layer)?;
                }
            }
            6 => tree.remove_lower(dir, &name, layer)?,
            _ if input.byte() % 2 == 0 => layer += 1,
            _ => tree.clear_lower(dir, layer)?,
        }
        for extent in tree.take_released() {
            area.release(&extent);
        }
    }
    let (image, summary) = write(&tree, area, data)?;
    assert_eq!(image.metadata().expect("fstat").len(), summary.bytes);
    check(&image);
    Ok(())
}

/// A name of the few that there are, so that operations meet.
fn name(input: &mut Input<'_>) -> Vec<u8> {
    let byte = input.byte();
    match byte % 16 {
        0 => vec![b'n'; 1 + usize::from(input.byte())],
        1 => input.bytes(4).to_vec(),
        n => vec![b'a' + n],
    }
}

fn attributes(input: &mut Input<'_>) -> Attributes {
    let flags = input.byte();
    let mut attributes = Attributes::implied_dir();
    if flags & 1 != 0 {
        attributes.mode = (input.number() & 0o7777) as u16;
        attributes.uid = input.number() as u32;
        attributes.gid = input.number() as u32;
        attributes.mtime = input.number() as i64;
        attributes.mtime_ns = (input.number() % 1_000_000_000) as u32;
    }
    let mut xattrs = BTreeMap::new();
    for i in 0..flags >> 5 {
        let prefix = match input.byte() % 4 {
            0 => "user.",
            1 => "security.",
            2 => "trusted.",
            _ => "system.posix_acl_access",
        };
        let name = [prefix.as_bytes(), &[b'a' + i]].concat();
        xattrs.insert(name, vec![i; input.number() as usize % 5000]);
    }
    // Unknown kinds of names are refused, which is as good.
    attributes.xattrs = Xattrs::encode("fuzz", &xattrs).unwrap_or_default();
    attributes
}

fn contents(
    area: &mut DataArea,
    size: u64,
    xattrs: &Xattrs,
    byte: u8,
) -> bantam_image::Result<bantam_image::erofs::Extent> {
    let mut writer = area.begin(size, xattrs)?;
    if byte % 3 == 0 {
        writer.skip(size / 2)?;
        writer.write(&vec![byte; (size - size / 2) as usize])?;
    } else {
        writer.write(&vec![byte; size as usize])?;
    }
    writer.finish()
}

pub fn seeds() -> Vec<Vec<u8>> {
    vec![
        (0..=255).collect(),
        (0..512).map(|i: u32| (i * 37 % 251) as u8).collect(),
        // A directory, a file in it, a hard link, a next layer, a removal.
        vec![
            0, 2, 0, 0, 1, 3, 1, 0, 0, 9, 5, 0, 3, 5, 1, 4, 0, 5, 7, 0, 1, 3, 6,
        ],
    ]
}
