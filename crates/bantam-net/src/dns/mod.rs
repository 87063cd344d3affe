//! Names: the gateway's port 53, answered by the host's name servers.

mod message;
mod names;
mod resolver;
mod servers;
#[cfg(test)]
mod tests;

pub(crate) use message::{MAX_QUERY, answer_address, answer_code, parse_query};
pub(crate) use names::Names;
#[cfg(test)]
pub(crate) use resolver::Learned;
pub(crate) use resolver::{Answer, Origin, Resolver};
pub(crate) use servers::Servers;
