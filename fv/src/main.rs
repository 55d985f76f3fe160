//! `fv`: a WireGuard-protocol tunnel in one process.
#![forbid(unsafe_code)]

mod cli;
mod clock;
mod config;
mod control;
mod daemon;
mod demo;
mod doctor;
mod environment;
mod events;
mod health;
mod ifname;
mod key;
mod link;
mod logger;
mod manual;
mod metrics;
mod namespace;
mod netlink;
mod show;
mod tunnel;
mod uapi;
mod up;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use cli::{Cli, Command};
use forestvpn_quantum::Handle;
use tunnel::Tunnel;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            if !text.is_empty() {
                eprintln!("fv: {text}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), String> {
    match &cli.command {
        Some(Command::Show { ifname, json }) => {
            show::run(Path::new(control::DIRECTORY), ifname.as_deref(), *json)
        }
        Some(Command::Doctor { ifname, json }) => {
            doctor::run(Path::new(control::DIRECTORY), ifname.as_deref(), *json)
        }
        Some(Command::Health { ifname, max_age, json }) => {
            health::run(Path::new(control::DIRECTORY), ifname.as_deref(), *max_age, *json)
        }
        Some(Command::Genkey) => key::genkey().map_err(|e| e.to_string()),
        Some(Command::Pubkey) => key::pubkey(io::stdin(), &mut io::stdout()).map_err(|e| e.to_string()),
        Some(Command::Manual { folder }) => manual::write(folder),
        Some(Command::Genpsk) => key::genpsk().map_err(|e| e.to_string()),
        Some(Command::Up { file, for_demo, extras, route_from }) => {
            let route_from = cli::route_from(route_from.as_ref())?;
            up::run(file.as_deref(), *for_demo, &extras.or_environment()?, route_from.as_deref())
        }
        Some(Command::Demo { megabytes, no_tun }) => {
            demo::run(demo::Options { megabytes: *megabytes, no_tun: *no_tun })
        }
        None => serve(cli),
    }
}

/// `fv IFNAME`.
fn serve(cli: &Cli) -> Result<(), String> {
    let Some(ifname) = &cli.ifname else {
        return Err("give the name of an interface; --help shows how".into());
    };
    let extras = cli.extras.or_environment()?;
    if cli.in_background {
        daemon::leave_terminal();
    } else {
        if is_typed()
            && control::scope(ifname).is_none()
            && let Some(question) = cli::mistyped(ifname)
        {
            return Err(question);
        }
        let foreground =
            cli.foreground || std::env::var_os("WG_PROCESS_FOREGROUND").is_some_and(|word| word == "1");
        if !foreground {
            daemon::start(ifname, &extras)?;
            // For a person, who may have meant something else; scripts see nothing.
            if io::stderr().is_terminal() {
                eprintln!(
                    "fv: {ifname} is there and served in the background; `ip link delete {ifname}` ends it"
                );
            }
            return Ok(());
        }
    }
    logger::start(ifname);
    let tunnel = Tunnel::start(ifname, &extras, Duration::ZERO, Handle::stop)?;
    if cli.in_background {
        daemon::tell_parent().map_err(|e| format!("the process that started this one is gone: {e}"))?;
    }
    daemon::tell_systemd();
    tunnel.wait()
}

/// Whether a person may have written the name by mistake: not after `--`, which says that it is one, and not when
/// wg-quick passes it on.
fn is_typed() -> bool {
    std::env::var_os("WG_QUICK_USERSPACE_IMPLEMENTATION").is_none()
        && !std::env::args_os().any(|word| word == "--")
}
