use super::*;

fn leaf(leaf: u32, registers: [u32; 4]) -> CpuidEntry {
    let [eax, ebx, ecx, edx] = registers;
    CpuidEntry {
        leaf,
        subleaf: None,
        eax,
        ebx,
        ecx,
        edx,
    }
}

fn subleaf(number: u32, subleaf: u32, registers: [u32; 4]) -> CpuidEntry {
    CpuidEntry {
        subleaf: Some(subleaf),
        ..leaf(number, registers)
    }
}

/// A host that has everything.
fn supported() -> Vec<CpuidEntry> {
    let all = [!0; 4];
    vec![
        leaf(0x0, [0x1f, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
        leaf(
            0x1,
            [0x000a_0671, 0xffff_0800, !(HYPERVISOR | TSC_DEADLINE), !HTT],
        ),
        subleaf(0x4, 0, [0xfc00_4121, 1, 2, 3]), // level 1, data
        subleaf(0x4, 1, [0xfc00_4143, 1, 2, 3]), // level 2
        subleaf(0x4, 2, [0xfc3f_c163, 1, 2, 3]), // level 3
        subleaf(0x4, 3, [0; 4]),
        leaf(0x5, all),
        leaf(0x6, all),
        subleaf(0x7, 0, [0, 0x219c_05a9, 0, 0]),
        leaf(0xa, all),
        subleaf(0xb, 0, [1, 2, 0x100, 77]),
        subleaf(0xb, 1, [5, 16, 0x201, 77]),
        subleaf(0xd, 0, [7, 0x340, 0x340, 0]),
        subleaf(0x12, 0, all),
        subleaf(0x14, 0, all),
        subleaf(0x1f, 0, all),
        leaf(0x4000_0000, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
        leaf(0x4000_0001, [0x0100_7efb, 0, 0, 0]),
        leaf(0x8000_0000, [0x8000_0022, 0, 0, 0]),
        leaf(0x8000_0001, [0, 0, !0, 0x2c10_0800]),
        leaf(0x8000_0002, [0x4142_4344; 4]),
        leaf(0x8000_0007, all),
        leaf(0x8000_0008, [0x3028, 0, 0xffff, 0]),
        leaf(0x8000_000a, all),
        subleaf(0x8000_001d, 3, [0x0000_0163, 1, 2, 3]),
        leaf(0x8000_001e, all),
        leaf(0x8000_0022, all),
    ]
}

fn find(entries: &[CpuidEntry], leaf: u32, subleaf: Option<u32>) -> CpuidEntry {
    let mut found = entries
        .iter()
        .filter(|e| e.leaf == leaf && e.subleaf == subleaf);
    let entry = *found
        .next()
        .unwrap_or_else(|| panic!("leaf {leaf:#x} {subleaf:?}"));
    assert!(
        found.next().is_none(),
        "leaf {leaf:#x} {subleaf:?} is there twice"
    );
    entry
}

fn for_vcpu(id: u32, vcpus: u32) -> Vec<CpuidEntry> {
    CpuPolicy::default().apply(&supported(), id, vcpus, Some(2_445_400))
}

#[test]
fn features_that_a_microvm_cannot_use_are_hidden() {
    let entries = for_vcpu(0, 1);
    let features = find(&entries, 0x1, None);
    for (bit, name) in [
        (2, "DTES64"),
        (3, "MONITOR"),
        (5, "VMX"),
        (6, "SMX"),
        (7, "EST"),
    ] {
        assert_eq!(features.ecx >> bit & 1, 0, "{name}");
    }
    for (bit, name) in [
        (31, "hypervisor"),
        (24, "TSC deadline"),
        (21, "x2APIC"),
        (0, "SSE3"),
    ] {
        assert_eq!(features.ecx >> bit & 1, 1, "{name}");
    }
    assert_eq!(find(&entries, 0x6, None).eax, ARAT);
    assert_eq!(find(&entries, 0x8000_0001, None).ecx & 0b100, 0, "SVM");
    assert_eq!(find(&entries, 0x8000_0007, None).edx, INVARIANT_TSC);
    for absent in [0x5, 0xa, 0x12, 0x14, 0x1f, 0x8000_000a, 0x8000_0022] {
        assert!(
            entries.iter().all(|entry| entry.leaf != absent),
            "{absent:#x}"
        );
    }
}

#[test]
fn what_the_host_has_otherwise_is_kept() {
    let entries = for_vcpu(0, 1);
    for kept in supported() {
        if matches!(kept.leaf, 0x0 | 0x7 | 0xd | 0x4000_0001 | 0x8000_0002) {
            assert_eq!(find(&entries, kept.leaf, kept.subleaf), kept);
        }
    }
    assert_eq!(
        find(&entries, 0x1, None).eax,
        0x000a_0671,
        "family, model, stepping"
    );
}

#[test]
fn nothing_is_shown_that_the_host_does_not_support() {
    let few = vec![leaf(0x0, [1, 0, 0, 0]), leaf(0x1, [0; 4])];
    let entries = CpuPolicy {
        nested: true,
        pmu: true,
    }
    .apply(&few, 0, 1, Some(1_000_000));
    assert_eq!(entries.len(), 2);
    let features = find(&entries, 0x1, None);
    // The hypervisor's own, which it provides without listing them.
    assert_eq!((features.ecx, features.edx), (HYPERVISOR | TSC_DEADLINE, 0));
}

#[test]
fn each_vcpu_knows_its_place() {
    for (vcpus, bits) in [(1, 0), (2, 1), (3, 2), (4, 2), (8, 3), (254, 8)] {
        for id in [0, vcpus - 1] {
            let entries = for_vcpu(id, vcpus);
            let features = find(&entries, 0x1, None);
            assert_eq!(features.ebx >> 24, id);
            assert_eq!(features.ebx >> 16 & 0xff, (1u32 << bits).min(255));
            assert_eq!(features.ebx & 0xffff, 0x0800, "CLFLUSH size");
            assert_eq!(features.edx & HTT != 0, vcpus > 1);

            let threads = find(&entries, 0xb, Some(0));
            assert_eq!((threads.eax, threads.ebx, threads.ecx), (0, 1, 0x100));
            let cores = find(&entries, 0xb, Some(1));
            assert_eq!((cores.eax, cores.ebx, cores.ecx), (bits, vcpus, 0x201));
            let end = find(&entries, 0xb, Some(2));
            assert_eq!((end.eax, end.ebx, end.ecx), (0, 0, 2));
            assert!([threads, cores, end].iter().all(|level| level.edx == id));

            assert_eq!(find(&entries, 0x8000_001e, None).eax, id);
            let amd = find(&entries, 0x8000_0008, None);
            assert_eq!((amd.ecx & 0xff, amd.ecx >> 12 & 0xf), (vcpus - 1, bits));
            assert_eq!(amd.eax, 0x3028, "address widths");
        }
    }
}

#[test]
fn the_last_level_cache_is_shared_and_the_others_are_not() {
    let entries = for_vcpu(0, 4);
    for (index, sharing) in [(0, 0), (1, 0), (2, 3)] {
        let cache = find(&entries, 0x4, Some(index));
        assert_eq!(cache.eax >> 14 & 0xfff, sharing);
        assert_eq!(cache.eax >> 26, 3, "cores in the package, less one");
        assert_eq!(
            (cache.ebx, cache.ecx, cache.edx),
            (1, 2, 3),
            "its size stays"
        );
    }
    assert_eq!(find(&entries, 0x4, Some(3)).eax, 0, "the end of the list");
    assert_eq!(find(&entries, 0x8000_001d, Some(3)).eax >> 14, 3);
}

#[test]
fn the_tscs_frequency_is_told() {
    let entries = for_vcpu(0, 1);
    assert_eq!(find(&entries, 0x4000_0000, None).eax, 0x4000_0010);
    let timing = find(&entries, 0x4000_0010, None);
    assert_eq!((timing.eax, timing.ebx), (2_445_400, 1_000_000));

    let unknown = CpuPolicy::default().apply(&supported(), 0, 1, None);
    assert!(unknown.iter().all(|entry| entry.leaf != 0x4000_0010));
    assert_eq!(find(&unknown, 0x4000_0000, None).eax, 0x4000_0001);
}

#[test]
fn nested_and_pmu_are_shown_on_request() {
    let policy = CpuPolicy {
        nested: true,
        pmu: true,
    };
    let entries = policy.apply(&supported(), 0, 1, None);
    assert_eq!(find(&entries, 0x1, None).ecx >> 5 & 1, 1, "VMX");
    assert_eq!(find(&entries, 0x8000_0001, None).ecx >> 2 & 1, 1, "SVM");
    assert_eq!(find(&entries, 0xa, None).eax, !0);
    assert_eq!(find(&entries, 0x8000_000a, None).eax, !0);
}
