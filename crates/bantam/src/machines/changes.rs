//! Changes to a machine.

use std::collections::BTreeMap;

use crate::spec::Spec;
use crate::{Error, NetworkConfig};

/// What [`Machines::update`](crate::Machines::update) changes; what is `None` or empty stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Number of vCPUs.
    pub cpus: Option<u8>,
    /// Memory in MiB.
    pub memory_mib: Option<u32>,
    /// Size of the disk in GiB; it can only grow.
    pub disk_gib: Option<u32>,
    /// Variables to set for every command.
    pub env: Vec<(String, String)>,
    /// Variables not to set any more.
    pub remove_env: Vec<String>,
    /// Working directory of every command.
    pub workdir: Option<String>,
    /// User of every command.
    pub user: Option<String>,
    /// Labels to attach.
    pub labels: BTreeMap<String, String>,
    /// Labels to take off.
    pub remove_labels: Vec<String>,
    /// Another network, or none. If nothing but the policy of a network changes, and nothing else,
    /// that is done while the machine runs.
    pub network: Option<Option<NetworkConfig>>,
    /// What the network must be for that change to be made: somebody else may have changed it
    /// since this one was worked out.
    pub network_was: Option<Option<NetworkConfig>>,
}

impl Changes {
    /// Whether there is nothing to change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let changes = Self {
            network_was: None,
            ..self.clone()
        };
        changes == Self::default()
    }

    /// Refuses a change of a network that is another by now.
    pub(super) fn check_network(&self, present: Option<&NetworkConfig>) -> Result<(), Error> {
        match &self.network_was {
            Some(was) if was.as_ref() != present => Err(changed_meanwhile()),
            _ => Ok(()),
        }
    }

    /// The network whose policy is all that changes in a machine of this description.
    pub(super) fn policy_only(&self, spec: &Spec) -> Option<&NetworkConfig> {
        let network = self.network.as_ref()?.as_ref()?;
        let rest = Self {
            network: None,
            ..self.clone()
        };
        let same_policy = NetworkConfig {
            policy: spec.network.as_ref()?.policy.clone(),
            ..network.clone()
        };
        (rest.is_empty() && Some(&same_policy) == spec.network.as_ref()).then_some(network)
    }

    pub(super) fn apply(&self, spec: &mut Spec) -> Result<(), Error> {
        if let Some(gib) = self.disk_gib {
            if gib < spec.disk_gib {
                return Err(Error::BadChange(format!(
                    "its disk of {} GiB cannot shrink to {gib} GiB",
                    spec.disk_gib
                )));
            }
            spec.disk_gib = gib;
        }
        spec.cpus = self.cpus.unwrap_or(spec.cpus);
        spec.memory_mib = self.memory_mib.unwrap_or(spec.memory_mib);
        let env = &mut spec.defaults.env;
        env.retain(|(name, _)| {
            !self.remove_env.contains(name) && !self.env.iter().any(|(new, _)| new == name)
        });
        env.extend(self.env.iter().cloned());
        if self.workdir.is_some() {
            spec.defaults.workdir.clone_from(&self.workdir);
        }
        if self.user.is_some() {
            spec.defaults.user.clone_from(&self.user);
        }
        spec.labels
            .retain(|key, _| !self.remove_labels.contains(key));
        spec.labels.extend(self.labels.clone());
        if let Some(network) = &self.network {
            self.check_network(spec.network.as_ref())?;
            spec.network.clone_from(network);
        }
        Ok(())
    }
}

/// The refusal of a change that somebody else's change has overtaken.
pub(super) fn changed_meanwhile() -> Error {
    Error::BadChange("somebody else changed its network at the same time; try again".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_changes_what_it_names_and_nothing_else() {
        let mut spec = Spec::default();
        spec.defaults.env = vec![("A".into(), "1".into()), ("B".into(), "2".into())];
        spec.labels.insert("x".into(), "y".into());
        let before = spec.cpus;
        let changes = Changes {
            memory_mib: Some(1024),
            env: vec![("A".into(), "3".into())],
            remove_env: vec!["B".into()],
            remove_labels: vec!["x".into()],
            ..Changes::default()
        };
        changes.apply(&mut spec).unwrap();
        assert_eq!((spec.cpus, spec.memory_mib), (before, 1024));
        assert_eq!(spec.defaults.env, [("A".to_owned(), "3".to_owned())]);
        assert!(spec.labels.is_empty());
    }

    #[test]
    fn a_network_that_somebody_else_changed_is_not_changed_back() {
        let mut spec = Spec::default();
        let change = Changes {
            network: Some(Some(NetworkConfig::public())),
            network_was: Some(None),
            ..Changes::default()
        };
        change.apply(&mut spec).unwrap();
        assert!(matches!(change.apply(&mut spec), Err(Error::BadChange(_))));
    }

    #[test]
    fn only_a_new_policy_alone_can_be_put_in_force_at_once() {
        let mut spec = Spec::default();
        let policy = |network: NetworkConfig| Changes {
            network: Some(Some(network)),
            ..Changes::default()
        };
        let private = policy(NetworkConfig::public().allow_private());
        assert!(private.policy_only(&spec).is_none(), "there is no card");
        spec.network = Some(NetworkConfig::public());
        assert!(private.policy_only(&spec).is_some());
        let more = Changes {
            cpus: Some(2),
            ..private
        };
        assert!(more.policy_only(&spec).is_none());
        let port = NetworkConfig::public().publish("8080:80").unwrap();
        assert!(policy(port).policy_only(&spec).is_none());
    }

    #[test]
    fn a_disk_does_not_shrink() {
        let mut spec = Spec::default();
        let shrink = Changes {
            disk_gib: Some(spec.disk_gib - 1),
            ..Changes::default()
        };
        assert!(matches!(shrink.apply(&mut spec), Err(Error::BadChange(_))));
    }
}
