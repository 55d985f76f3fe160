//! End to end, in network namespaces of our own: `fv` against itself and against other implementations, driven by
//! the real `wg`, `wg-quick` and `ip`. Each test builds its own hosts, so all of them run beside each other.
//!
//! They need root and other programs, so `cargo test` leaves them out ("ignored"); `task test:net` runs them.
//! What a test needs and does not find makes it print why and stop; with `FV_NO_SKIP` set it fails instead.
//! `FV_TEST_BIN` runs the suite against another `fv` binary (or wireguard-go, to check the suite itself),
//! `FV_PEERS` names the folder that `.ci/peers` filled.

mod capture;
mod host;
mod node;
mod pair;
mod transfer;

mod allowed_ips;
mod command_line;
mod config_file;
mod doctor;
mod fallbacks;
mod interop;
mod kernel_suite;
mod protocol;
mod roaming;
mod scale;
mod teardown;
mod threads;
mod timers;
mod uapi;
mod wg_tools;
