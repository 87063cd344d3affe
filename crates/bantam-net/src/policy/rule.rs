//! Rules as they are written: hosts and address blocks, each with optional ports.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::Error;

/// Most port ranges in one rule.
pub const MAX_PORT_RANGES: usize = 64;
/// Longest name (RFC 1035 §2.3.4), in its written form without the final dot.
pub const MAX_NAME: usize = 253;

/// A block of addresses, such as `10.0.0.0/8` or `2001:db8::/32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// A block of the first `prefix` bits of `address`; the other bits become zero.
    ///
    /// # Errors
    /// [`Error::Rule`] when the prefix is longer than the address.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Cidr, Error> {
        let bits = width(address);
        if prefix > bits {
            return Err(Error::Rule {
                rule: format!("{address}/{prefix}"),
                reason: "the prefix is longer than the address",
            });
        }
        Ok(Cidr {
            address: masked(address, prefix),
            prefix,
        })
    }

    pub(super) const fn literal(address: IpAddr, prefix: u8) -> Cidr {
        Cidr { address, prefix }
    }

    /// Length of the prefix in bits.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether `address` lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && masked(address, self.prefix) == masked(self.address, self.prefix)
    }

    /// Whether all of `other` lies in it.
    pub fn covers(&self, other: &Cidr) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX
                .checked_shl(32 - u32::from(prefix.min(32)))
                .unwrap_or(0);
            IpAddr::V4((u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX
                .checked_shl(128 - u32::from(prefix.min(128)))
                .unwrap_or(0);
            IpAddr::V6((u128::from(v6) & mask).into())
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = Error;

    /// `ADDRESS` or `ADDRESS/PREFIX`. Bits after the prefix must be zero: `10.0.0.1/8` is more
    /// often a slip than meant.
    fn from_str(text: &str) -> Result<Cidr, Error> {
        let wrong = |reason| Error::Rule {
            rule: text.to_owned(),
            reason,
        };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address
            .parse()
            .map_err(|_| wrong("it is not an IP address"))?;
        let prefix = match prefix {
            Some(prefix) => number(prefix).ok_or_else(|| wrong("its prefix is not a number"))?,
            None => width(address),
        };
        let cidr = Cidr::new(address, prefix)?;
        if cidr.address != address {
            return Err(wrong("it has bits set after its prefix"));
        }
        Ok(cidr)
    }
}

/// Digits only: no sign, no blanks.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// The ports a rule speaks of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// All ports, and protocols without ports.
    pub fn any() -> Ports {
        Ports::default()
    }

    /// Whether a packet to `port` is meant; `None` for a protocol without ports, which only a rule
    /// without ports means.
    pub fn contain(&self, port: Option<u16>) -> bool {
        self.0.is_empty()
            || port.is_some_and(|port| {
                self.0
                    .iter()
                    .any(|&(low, high)| (low..=high).contains(&port))
            })
    }

    fn parse(text: &str, rule: &str) -> Result<Ports, Error> {
        let wrong = |reason| Error::Rule {
            rule: rule.to_owned(),
            reason,
        };
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            match (number(low), number(high)) {
                (Some(low), Some(high)) if 0 < low && low <= high => ranges.push((low, high)),
                _ => return Err(wrong("its ports are not like 80, 80,443 or 8000-8099")),
            }
            if ranges.len() > MAX_PORT_RANGES {
                return Err(wrong("it has too many ports"));
            }
        }
        Ok(Ports(ranges))
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (low, high)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match low == high {
                true => write!(f, "{comma}{low}")?,
                false => write!(f, "{comma}{low}-{high}")?,
            }
        }
        Ok(())
    }
}

/// A block of addresses with optional ports: `10.0.0.0/8`, `10.1.2.3:22`, `10.0.0.0/8:80,443`,
/// `[2001:db8::/32]:8000-8099`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CidrRule {
    /// The addresses.
    pub cidr: Cidr,
    /// The ports.
    pub ports: Ports,
}

impl CidrRule {
    /// Whether it speaks of `address` and `port`.
    pub fn matches(&self, address: IpAddr, port: Option<u16>) -> bool {
        self.cidr.contains(address) && self.ports.contain(port)
    }
}

impl FromStr for CidrRule {
    type Err = Error;

    fn from_str(text: &str) -> Result<CidrRule, Error> {
        let (cidr, ports) = if let Some(rest) = text.strip_prefix('[') {
            let (cidr, rest) = rest.split_once(']').ok_or_else(|| Error::Rule {
                rule: text.to_owned(),
                reason: "its bracket is not closed",
            })?;
            match rest.strip_prefix(':') {
                Some(ports) => (cidr, Some(ports)),
                None if rest.is_empty() => (cidr, None),
                None => {
                    return Err(Error::Rule {
                        rule: text.to_owned(),
                        reason: "after the bracket stands something else than ports",
                    });
                }
            }
        } else if text.matches(':').count() == 1 {
            match text.split_once(':') {
                Some((cidr, ports)) => (cidr, Some(ports)),
                None => (text, None),
            }
        } else {
            (text, None)
        };
        Ok(CidrRule {
            cidr: cidr.parse()?,
            ports: match ports {
                Some(ports) => Ports::parse(ports, text)?,
                None => Ports::any(),
            },
        })
    }
}

impl fmt::Display for CidrRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ports.0.is_empty(), self.cidr.address) {
            (true, _) => write!(f, "{}", self.cidr),
            (false, IpAddr::V4(_)) => write!(f, "{}:{}", self.cidr, self.ports),
            (false, IpAddr::V6(_)) => write!(f, "[{}]:{}", self.cidr, self.ports),
        }
    }
}

/// A host name or all names below one, with optional ports: `pypi.org`, `*.debian.org`,
/// `github.com:22,443`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostRule {
    name: String,
    below: bool,
    ports: Ports,
}

impl HostRule {
    /// Whether it speaks of `name` (lower case, no final dot) and `port`.
    pub fn matches(&self, name: &str, port: Option<u16>) -> bool {
        self.matches_name(name) && self.ports.contain(port)
    }

    /// Whether it speaks of `name`, on whatever port.
    pub fn matches_name(&self, name: &str) -> bool {
        if self.below {
            name.strip_suffix(&self.name)
                .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        } else {
            name == self.name
        }
    }
}

impl FromStr for HostRule {
    type Err = Error;

    fn from_str(text: &str) -> Result<HostRule, Error> {
        let wrong = |reason| Error::Rule {
            rule: text.to_owned(),
            reason,
        };
        let (name, ports) = match text.split_once(':') {
            Some((name, ports)) => (name, Ports::parse(ports, text)?),
            None => (text, Ports::any()),
        };
        let (name, below) = match name.strip_prefix("*.") {
            Some(name) => (name, true),
            None => (name, false),
        };
        if name.parse::<IpAddr>().is_ok() {
            return Err(wrong("it is an address; give it as an address block"));
        }
        let name = normal_name(name).ok_or_else(|| wrong("it is not a host name"))?;
        Ok(HostRule { name, below, ports })
    }
}

impl fmt::Display for HostRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.below { "*." } else { "" };
        let colon = if self.ports.0.is_empty() { "" } else { ":" };
        write!(f, "{star}{}{colon}{}", self.name, self.ports)
    }
}

/// A name as rules compare it: lower case, without the final dot. `None` when it is not a name in
/// letters, digits, hyphens and underscores.
pub(crate) fn normal_name(name: &str) -> Option<String> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    (name.len() <= MAX_NAME && name.split('.').all(label)).then(|| name.to_ascii_lowercase())
}
