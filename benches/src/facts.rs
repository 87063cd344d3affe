//! What a reader must know of a machine to compare numbers made on it.

use std::collections::BTreeMap;
use std::fs;

use serde::Serialize;

/// The machine that measures: this host, or the rig's.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    cpu: String,
    cores: usize,
    kernel: String,
    /// By the name of a weakness of CPUs, what the kernel says of it, "Not affected" left out.
    mitigations: BTreeMap<String, String>,
    /// Over the last minute, after the last measurement.
    load: String,
}

impl Facts {
    pub(crate) fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: model(&text("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: format!(
                "{} {}",
                text("/proc/sys/kernel/ostype").trim(),
                text("/proc/sys/kernel/osrelease").trim()
            ),
            mitigations: mitigations(),
            load: text("/proc/loadavg")
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

fn model(cpuinfo: &str) -> String {
    cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, model)| model.trim())
        .to_owned()
}

fn mitigations() -> BTreeMap<String, String> {
    let entries = fs::read_dir("/sys/devices/system/cpu/vulnerabilities");
    entries
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let state = fs::read_to_string(&path).ok()?.trim().to_owned();
            let name = path.file_name()?.to_string_lossy().into_owned();
            (state != "Not affected").then_some((name, state))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_the_first_cpus() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A: B\n\nmodel name\t: C\n";
        assert_eq!(model(cpuinfo), "A: B");
        assert_eq!(model(""), "unknown");
    }
}
