//! `fv`: a WireGuard-protocol tunnel in one process.
#![forbid(unsafe_code)]
#![expect(dead_code, reason = "its callers come with the next commit")]

mod config;
mod control;
mod ifname;
mod key;
mod link;
mod logger;
mod namespace;
mod netlink;
mod uapi;
mod up;

fn main() {}
