//! Who a command runs as: the user rules of `docker run --user` over the image's
//! own `/etc/passwd` and `/etc/group`, read here because a static binary has no NSS.

use std::io::Read;

/// Most bytes read of `/etc/passwd` or `/etc/group`; both come with the image.
const MAX_DATABASE_LEN: u64 = 4 << 20;

/// A resolved user.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Account {
    /// User id.
    pub(crate) uid: u32,
    /// Primary group id.
    pub(crate) gid: u32,
    /// Supplementary group ids.
    pub(crate) groups: Vec<u32>,
    /// The home directory.
    pub(crate) home: Vec<u8>,
}

/// The two files, as they are.
pub(crate) struct Database {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

impl Database {
    /// Reads both files; a missing one is empty.
    pub(crate) fn load() -> Self {
        Self {
            passwd: load("/etc/passwd"),
            group: load("/etc/group"),
        }
    }

    /// Resolves `user`, `uid`, `user:group`, `uid:gid`, `uid:group` or `user:gid`.
    /// Names are tried before numbers. A number that is in no file is taken as it is,
    /// with group 0 and home `/`. Without a group the user's own groups are taken
    /// (primary and supplementary), with one only that.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    pub(crate) fn resolve(&self, spec: Option<&str>) -> Result<Account, String> {
        let (user, group) = match spec.unwrap_or("root").split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec.unwrap_or("root"), None),
        };
        let user = if user.is_empty() { "root" } else { user };
        let entry = self.user(user);
        let mut account = match (entry, number(user)) {
            (Some(entry), _) => Account {
                uid: entry.uid,
                gid: entry.gid,
                groups: Vec::new(),
                home: entry.home.to_vec(),
            },
            (None, Some(uid)) => Account::bare(uid),
            (None, None) if user == "root" => Account::bare(0),
            (None, None) => {
                return Err(format!("there is no user {user:?} in /etc/passwd"));
            }
        };
        match group.filter(|group| !group.is_empty()) {
            Some(group) => {
                account.gid = self
                    .group(group)
                    .or_else(|| number(group))
                    .ok_or_else(|| format!("there is no group {group:?} in /etc/group"))?;
            }
            None => {
                if let Some(entry) = entry {
                    account.groups = self.groups_of(entry.name);
                }
            }
        }
        Ok(account)
    }

    fn user(&self, wanted: &str) -> Option<User<'_>> {
        let by_name = users(&self.passwd).find(|user| user.name == wanted.as_bytes());
        by_name.or_else(|| {
            let uid = number(wanted)?;
            users(&self.passwd).find(|user| user.uid == uid)
        })
    }

    fn group(&self, wanted: &str) -> Option<u32> {
        groups(&self.group)
            .find(|group| group.name == wanted.as_bytes())
            .map(|group| group.gid)
    }

    fn groups_of(&self, name: &[u8]) -> Vec<u32> {
        groups(&self.group)
            .filter(|group| group.members.split(|byte| *byte == b',').any(|m| m == name))
            .map(|group| group.gid)
            .collect()
    }
}

impl Account {
    fn bare(uid: u32) -> Self {
        Self {
            uid,
            gid: 0,
            groups: Vec::new(),
            home: b"/".to_vec(),
        }
    }
}

#[derive(Clone, Copy)]
struct User<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

struct Group<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

fn users(file: &[u8]) -> impl Iterator<Item = User<'_>> {
    lines(file).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let name = fields.next()?;
        let uid = id(fields.nth(1)?)?;
        let gid = id(fields.next()?)?;
        let home = fields.nth(1).filter(|home| !home.is_empty());
        Some(User {
            name,
            uid,
            gid,
            home: home.unwrap_or(b"/"),
        })
    })
}

fn groups(file: &[u8]) -> impl Iterator<Item = Group<'_>> {
    lines(file).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let name = fields.next()?;
        let gid = id(fields.nth(1)?)?;
        Some(Group {
            name,
            gid,
            members: fields.next().unwrap_or_default(),
        })
    })
}

fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii)
}

fn id(field: &[u8]) -> Option<u32> {
    number(str::from_utf8(field).ok()?)
}

/// A user or group id. The largest value means "unchanged" to the kernel.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id = digits.then(|| text.parse().ok())??;
    (id != u32::MAX).then_some(id)
}

fn load(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        // What could be read before an error still counts.
        let _ = file.take(MAX_DATABASE_LEN).read_to_end(&mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> Database {
        Database {
            passwd: b"root:x:0:0:root:/root:/bin/sh\n\
                app:x:1000:1001:an app:/home/app:/bin/sh\n\
                homeless:x:1002:1002::\n\
                # a comment\nbroken:x:notanumber:0::/:\n\
                42:x:4242:4242::/numeric-name:/bin/sh\n\
                wrap:x:4294967295:0::/:/bin/sh\n"
                .to_vec(),
            group: b"root:x:0:root\nbin:x:1:root,app\nwheel:x:10:app\nappgroup:x:1001:\n\
                77:x:7777:\n"
                .to_vec(),
        }
    }

    fn account(uid: u32, gid: u32, groups: &[u32], home: &str) -> Account {
        Account {
            uid,
            gid,
            groups: groups.to_vec(),
            home: home.into(),
        }
    }

    #[test]
    fn every_form_of_a_user_spec_resolves_as_docker_does() {
        let table = [
            (None, account(0, 0, &[0, 1], "/root")),
            (Some(""), account(0, 0, &[0, 1], "/root")),
            (Some("root"), account(0, 0, &[0, 1], "/root")),
            (Some("app"), account(1000, 1001, &[1, 10], "/home/app")),
            (Some("1000"), account(1000, 1001, &[1, 10], "/home/app")),
            (Some("app:wheel"), account(1000, 10, &[], "/home/app")),
            (Some("app:5"), account(1000, 5, &[], "/home/app")),
            (Some("1000:1"), account(1000, 1, &[], "/home/app")),
            (Some("1000:wheel"), account(1000, 10, &[], "/home/app")),
            (Some("31337"), account(31337, 0, &[], "/")),
            (Some("31337:wheel"), account(31337, 10, &[], "/")),
            (Some("homeless"), account(1002, 1002, &[], "/")),
            (Some("app:"), account(1000, 1001, &[1, 10], "/home/app")),
            (Some(":wheel"), account(0, 10, &[], "/root")),
            (Some("42"), account(4242, 4242, &[], "/numeric-name")),
            (Some("app:77"), account(1000, 7777, &[], "/home/app")),
        ];
        for (spec, expected) in table {
            assert_eq!(database().resolve(spec), Ok(expected), "spec {spec:?}");
        }
    }

    #[test]
    fn a_missing_user_or_group_is_named() {
        for (spec, named) in [
            ("nobody", "nobody"),
            ("app:staff", "staff"),
            ("broken", "broken"),
            ("wrap", "wrap"),
            ("4294967295", "4294967295"),
            ("0:4294967295", "4294967295"),
            ("-1", "-1"),
        ] {
            let error = database().resolve(Some(spec)).unwrap_err();
            assert!(error.contains(named), "{spec}: {error}");
        }
    }

    #[test]
    fn root_and_numbers_work_without_any_file() {
        let empty = Database {
            passwd: Vec::new(),
            group: Vec::new(),
        };
        assert_eq!(empty.resolve(None), Ok(account(0, 0, &[], "/")));
        assert_eq!(empty.resolve(Some("root")), Ok(account(0, 0, &[], "/")));
        assert_eq!(empty.resolve(Some("7:8")), Ok(account(7, 8, &[], "/")));
        assert!(empty.resolve(Some("app")).is_err());
    }
}
