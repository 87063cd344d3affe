#![no_main]

libfuzzer_sys::fuzz_target!(
    init: bantam_fuzz::write_seeds(bantam_fuzz::frames::seeds()),
    |data: &[u8]| bantam_fuzz::frames::run(data)
);
