//! `fv up FILE`: what wg-quick does, in this one process and without iproute2: interface, key, peers, addresses,
//! MTU, routes, policy rules, DNS and hooks, and all of it undone at the end. Called by `main`.

mod dns;
mod forward;
mod hooks;
mod resolve;
mod routing;
mod silence;
mod undo;

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{Handle, PublicKey};
use ipnet::IpNet;

use crate::cli::Extras;
use crate::clock::{self, Mark};
use crate::config::{ConfigFile, Hook, Table};
use crate::environment::Environment;
use crate::netlink::Netlink;
use crate::tunnel::Tunnel;
use crate::{daemon, ifname, logger};
use forward::Forward;
use resolve::{Name, Pauses, Resolver};
use silence::Silence;
use undo::Undo;

/// How often it is looked whether the tunnel still runs.
const LOOK: Duration = Duration::from_millis(500);

/// What the main thread waits for.
enum Wake {
    /// A signal came, or the socket file was removed: end.
    End,
    /// This peer has its endpoint now.
    Found(PublicKey),
}

/// Brings up the tunnel that `file` describes and keeps it up until it is asked to end. With `for_demo` that
/// happens when standard input is closed, and the counters are written to standard output then.
///
/// # Errors
/// What is wrong, in a sentence or one per line of the file; nothing is left behind.
pub(crate) fn run(
    file: Option<&Path>,
    for_demo: bool,
    extras: &Extras,
    route_from: Option<&str>,
) -> Result<(), String> {
    let (name, path) = file.map_or_else(from_environment, locate)?;
    logger::start(&name);
    if !for_demo {
        logger::talk();
    }
    let config = if file.is_some() { read(&path)? } else { read_environment()? };
    let interface = &config.interface;
    let all = [&interface.pre_up, &interface.post_up, &interface.pre_down, &interface.post_down];
    let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    hooks::check(all.into_iter().flatten()).map_err(|e| at(&e))?;
    if interface.save_config {
        log::warn!(
            "SaveConfig is not done by fv: what `wg set` changes is lost at the end, the file stays as it is"
        );
    }
    let mut netlink = Netlink::open().map_err(|e| e.to_string())?;
    let handed_over = std::env::var_os("WG_TUN_FD").is_some();
    if !handed_over && netlink.link(&name).map_err(|e| e.to_string())?.is_some() {
        return Err(format!(
            "the interface {name} exists already; end what made it, or `ip link delete {name}`"
        ));
    }
    for hook in &interface.pre_up {
        hooks::run(hook, &name).map_err(|e| at(&e))?;
    }
    let (wake, waking) = channel();
    let end = wake.clone();
    let mark = Mark::of(&name);
    let least = mark.as_ref().and_then(Mark::read).map(clock::settle).unwrap_or_default();
    let tunnel = Tunnel::start(&name, extras, least, move |_| drop(end.send(Wake::End)))?;
    if for_demo {
        end_with_stdin(wake.clone()).map_err(|e| e.to_string())?;
    }
    let mut up = Up { mark_of_time: mark, ..Up::new(tunnel, &config, netlink, wake)? };
    let outcome = up.bring_up(route_from).and_then(|()| up.stay(&waking));
    if for_demo {
        tell_counters(up.tunnel.handle());
    }
    up.remember(true);
    let ended = up.take_down();
    outcome.and(ended).map_err(|e| if e.starts_with("line ") { at(&e) } else { e })
}

/// The interface's name and the file: a path to NAME.conf, or NAME for /etc/wireguard/NAME.conf.
fn locate(file: &Path) -> Result<(String, PathBuf), String> {
    let text = file.to_string_lossy();
    let path = if !text.contains('/') && !text.ends_with(".conf") {
        Path::new("/etc/wireguard").join(format!("{text}.conf"))
    } else {
        file.to_owned()
    };
    let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".conf"));
    let Some(name) = name else {
        return Err(format!(
            "{}: the file is called after its interface and ends in .conf, such as wg0.conf",
            path.display()
        ));
    };
    ifname::check(name)
        .map_err(|reason| format!("{}: no interface can be called \"{name}\": {reason}", path.display()))?;
    Ok((name.to_owned(), path))
}

/// The interface's name, and what stands for a file in messages.
fn from_environment() -> Result<(String, PathBuf), String> {
    let name = variable("FV_INTERFACE").unwrap_or_else(|| "wg0".to_owned());
    ifname::check(&name).map_err(|reason| format!("FV_INTERFACE={}: {reason}", crate::uapi::shown(&name)))?;
    Ok((name, PathBuf::from("environment")))
}

/// An environment variable; an empty one is none.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn read_environment() -> Result<ConfigFile, String> {
    let made = Environment::read(variable)?;
    ConfigFile::parse(made.text.as_bytes()).map_err(|problems| {
        format!("nothing was done\n{}", problems.told(|line| made.variable(line).to_owned()))
    })
}

fn read(path: &Path) -> Result<ConfigFile, String> {
    let failed = |e: io::Error| format!("cannot read {}: {e}", path.display());
    let mut file = fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0 {
        log::warn!("{} holds a secret and everybody can read it; chmod 600 it", path.display());
    }
    let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(1 << 16));
    file.read_to_end(&mut bytes).map_err(failed)?;
    ConfigFile::parse(&bytes).map_err(|problems| format!("{}: nothing was done\n{problems}", path.display()))
}

/// A tunnel with everything around it.
struct Up<'a> {
    tunnel: Tunnel,
    config: &'a ConfigFile,
    netlink: Netlink,
    wake: Sender<Wake>,
    index: u32,
    /// The mark of the tunnel's own packets, 0 for none; for default routes it is their table too.
    mark: u32,
    /// What is passed on goes through the tunnel, instead of what this host sends itself.
    forward: Option<Forward>,
    ipv6: bool,
    /// Peers whose endpoint is a name that is not resolved yet.
    nameless: Vec<PublicKey>,
    /// Peers whose endpoint is a name, and that were silent until it was looked up again, which goes on.
    sought: Vec<PublicKey>,
    /// Where the latest time is kept that a peer has seen.
    mark_of_time: Option<Mark>,
    /// Of the peers that the file gives an endpoint.
    silences: Vec<(PublicKey, Silence)>,
    /// Everything is done, PostUp included.
    complete: bool,
    undo: Undo,
}

impl<'a> Up<'a> {
    fn new(
        tunnel: Tunnel,
        config: &'a ConfigFile,
        mut netlink: Netlink,
        wake: Sender<Wake>,
    ) -> Result<Self, String> {
        let name = tunnel.name();
        let link = netlink.link(name).map_err(|e| e.to_string())?;
        let index = link.ok_or_else(|| format!("the interface {name} is gone already"))?.index;
        let named =
            |peer: &&crate::config::Peer| peer.endpoint.as_ref().is_some_and(|e| e.address().is_none());
        let nameless = config.peers.iter().filter(named).map(|peer| peer.public_key).collect();
        let callable = config.peers.iter().filter(|peer| peer.endpoint.is_some());
        Ok(Self {
            tunnel,
            config,
            netlink,
            wake,
            index,
            mark: config.interface.fwmark.unwrap_or(0),
            forward: None,
            ipv6: true,
            sought: Vec::new(),
            mark_of_time: None,
            silences: callable.map(|peer| (peer.public_key, Silence::default())).collect(),
            nameless,
            complete: false,
            undo: Undo::default(),
        })
    }

    /// All steps that need no endpoint, and the rest too when nothing has to be waited for.
    fn bring_up(&mut self, route_from: Option<&str>) -> Result<(), String> {
        let text = |e: crate::netlink::Error| e.to_string();
        let interface = &self.config.interface;
        if let Some(from) = route_from {
            self.forward = Some(Forward::new(&mut self.netlink, from, interface.table)?);
        }
        let mtu = interface.mtu.unwrap_or_else(|| self.fitting_mtu());
        self.netlink.set_mtu(self.index, mtu.into()).map_err(text)?;
        self.look_for_ipv6();
        if self.mark == 0
            && self.forward.is_none()
            && routing::needs_mark(interface.table, &self.wanted(|_| true))
        {
            self.mark = routing::free_table(&mut self.netlink).map_err(text)?;
        }
        let handle = self.tunnel.handle().clone();
        let mut update = self.config.device_update();
        update.fwmark = Some(self.mark);
        // A keepalive that is switched on goes out at once; so these wait for their endpoint.
        for peer in update.peers.iter_mut().filter(|peer| self.nameless.contains(&peer.public_key)) {
            peer.persistent_keepalive = None;
        }
        handle.configure(update).map_err(|e| e.to_string())?;
        for address in interface.addresses.iter().filter(|net| self.ipv6 || net.addr().is_ipv4()) {
            match self.netlink.add_address(self.index, *address) {
                // Written down twice.
                Err(error) if !error.exists() => return Err(error.to_string()),
                _ => {}
            }
        }
        // First the sockets: a port that is in use is said here, and not by the link monitor later on.
        handle.set_link(true, mtu).map_err(|e| e.to_string())?;
        self.netlink.set_up(self.index, true).map_err(text)?;
        self.resolve(|_| Some(None)).map_err(|e| format!("cannot look up names: {e}"))?;
        daemon::tell_systemd();
        if self.is_held_up() {
            self.add_routes(|up, peer, net| !up.waits(peer, net))?;
            log::warn!(
                "default routes, DNS and PostUp wait until the names of the endpoints are resolved; the rest is up"
            );
            return Ok(());
        }
        self.finish()
    }

    /// What may cut off the resolver waits until nothing needs the resolver any more.
    fn finish(&mut self) -> Result<(), String> {
        let interface = &self.config.interface;
        let name = self.tunnel.name().to_owned();
        if interface.mtu.is_none() {
            let mtu = self.fitting_mtu();
            self.netlink.set_mtu(self.index, mtu.into()).map_err(|e| e.to_string())?;
        }
        if !interface.dns_servers.is_empty() {
            let text = dns::text(&interface.dns_servers, &interface.dns_search);
            match dns::set(&name, &text).map_err(|e| format!("cannot set the DNS servers: {e}"))? {
                dns::Outcome::Set => self.undo.dns(&name),
                dns::Outcome::NoTool => log::warn!(
                    "DNS was not set: there is no resolvconf here. Install openresolv, or put this into \
                     /etc/resolv.conf: {}",
                    text.trim_end().replace('\n', "; ")
                ),
            }
        }
        self.add_routes(|_, _, _| true)?;
        for hook in &interface.post_up {
            hooks::run(hook, &name).map_err(|e| e.to_string())?;
        }
        self.complete = true;
        let peers = match self.config.peers.len() {
            1 => "1 peer".to_owned(),
            count => format!("{count} peers"),
        };
        log::info!("up, with {peers}; Ctrl-C or SIGTERM ends it");
        Ok(())
    }

    /// Says once that IPv6 is off, if the file wants it.
    fn look_for_ipv6(&mut self) {
        self.ipv6 = !routing::ipv6_off(self.tunnel.name());
        let addresses = &self.config.interface.addresses;
        let allowed = self.config.peers.iter().flat_map(|peer| &peer.allowed_ips);
        let left_out = addresses.iter().chain(allowed).filter(|net| net.addr().is_ipv6()).count();
        if !self.ipv6 && left_out > 0 {
            log::warn!(
                "IPv6 is switched off here: {left_out} IPv6 addresses and routes of the file are left out"
            );
        }
    }

    /// The allowed IPs of some peers that routes are made for.
    fn wanted(&self, of: impl Fn(&PublicKey) -> bool) -> Vec<IpNet> {
        let peers = self.config.peers.iter().filter(|peer| of(&peer.public_key));
        let nets = peers.flat_map(|peer| &peer.allowed_ips).copied();
        nets.filter(|net| self.ipv6 || net.addr().is_ipv4()).collect()
    }

    /// A route through a peer that cannot be reached yet, and that would take the resolver's queries with it.
    fn waits(&self, peer: &PublicKey, net: &IpNet) -> bool {
        self.forward.is_none()
            && self.config.interface.table == Table::Auto
            && net.prefix_len() <= 1
            && self.nameless.contains(peer)
    }

    fn is_held_up(&self) -> bool {
        let mut peers = self.config.peers.iter();
        !self.nameless.is_empty() && !self.config.interface.dns_servers.is_empty()
            || peers.any(|peer| peer.allowed_ips.iter().any(|net| self.waits(&peer.public_key, net)))
    }

    fn add_routes(&mut self, which: impl Fn(&Self, &PublicKey, &IpNet) -> bool) -> Result<(), String> {
        let table = self.config.interface.table;
        let mut nets = Vec::new();
        for peer in &self.config.peers {
            let fits = self.wanted(|key| *key == peer.public_key);
            nets.extend(fits.into_iter().filter(|net| which(self, &peer.public_key, net)));
        }
        if let Some(forward) = &mut self.forward {
            return forward.add(&mut self.netlink, &mut self.undo, (self.index, self.tunnel.name()), &nets);
        }
        let mark = routing::needs_mark(table, &nets).then_some(self.mark);
        routing::add_routes(&mut self.netlink, &mut self.undo, self.index, table, &nets, mark)
            .map_err(|e| e.to_string())?;
        if mark.is_some() {
            let endpoints = self.endpoints();
            routing::loosen_reverse_paths(&mut self.netlink, &mut self.undo, &endpoints, self.mark);
        }
        Ok(())
    }

    /// The addresses of all endpoints that are known now.
    fn endpoints(&self) -> Vec<IpAddr> {
        let literal = self.config.peers.iter().filter_map(|peer| peer.endpoint.as_ref()?.address());
        let mut endpoints: Vec<_> = literal.map(|endpoint| endpoint.ip()).collect();
        let snapshot = self.tunnel.handle().snapshot().unwrap_or_default();
        endpoints.extend(snapshot.peers.iter().filter_map(|peer| Some(peer.endpoint?.ip())));
        endpoints
    }

    fn fitting_mtu(&mut self) -> u16 {
        let endpoints = self.endpoints();
        routing::fitting_mtu(&mut self.netlink, &endpoints, self.mark)
    }

    /// Starts to look up the endpoints that are names: of all peers, or of those that `which` gives an address which
    /// was tried in vain.
    fn resolve(&self, which: impl Fn(&PublicKey) -> Option<Option<SocketAddr>>) -> io::Result<()> {
        let names = self.config.peers.iter().filter_map(|peer| {
            let remote = peer.endpoint.as_ref().filter(|remote| remote.address().is_none())?;
            let avoid = which(&peer.public_key)?;
            Some(Name { peer: peer.public_key, host: remote.host.clone(), port: remote.port, avoid })
        });
        let teller = Teller {
            handle: self.tunnel.handle().clone(),
            wake: self.wake.clone(),
            mark: self.mark,
            keepalives: self.config.peers.iter().map(|p| (p.public_key, p.persistent_keepalive)).collect(),
        };
        resolve::start(names.collect(), Pauses::default(), Arc::new(teller))
    }

    /// Does what may help peers that do not answer: looks up their names again, and takes another UDP port when nobody
    /// answers and the file gives none, for an address translation on the way may be stuck.
    fn look_after_peers(&mut self) {
        let Ok(snapshot) = self.tunnel.handle().snapshot() else { return };
        let mut silent = Vec::new();
        for (key, silence) in &mut self.silences {
            let peer = snapshot.peers.iter().find(|peer| peer.public_key == *key);
            if let Some(peer) =
                peer.filter(|peer| silence.look(peer.rx_bytes, peer.tx_bytes, peer.persistent_keepalive))
            {
                silent.push((*key, peer.endpoint));
            }
        }
        if silent.is_empty() {
            return;
        }
        if silent.len() == self.silences.len() && self.config.interface.listen_port.unwrap_or(0) == 0 {
            log::info!(
                "no peer answers: another UDP port is taken, in case that the way of this one is blocked"
            );
            let update = DeviceUpdate { listen_port: Some(0), ..DeviceUpdate::default() };
            if let Err(error) = self.tunnel.handle().configure(update) {
                log::warn!("{error}");
            }
        }
        silent.retain(|(key, _)| !self.nameless.contains(key) && !self.sought.contains(key));
        let avoid = |key: &PublicKey| silent.iter().find(|(k, _)| k == key).map(|(_, endpoint)| *endpoint);
        match self.resolve(avoid) {
            Ok(()) => {
                let named = |peer: &&crate::config::Peer| {
                    avoid(&peer.public_key).is_some()
                        && peer.endpoint.as_ref().is_some_and(|remote| remote.address().is_none())
                };
                self.sought.extend(self.config.peers.iter().filter(named).map(|peer| peer.public_key));
            }
            Err(error) => log::warn!("cannot look up names: {error}"),
        }
    }

    /// Waits for the end, and finishes what waits for names.
    fn stay(&mut self, waking: &Receiver<Wake>) -> Result<(), String> {
        let mut looked = Instant::now();
        let mut marked: Option<Instant> = None;
        loop {
            match waking.recv_timeout(LOOK) {
                Ok(Wake::End) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(Wake::Found(peer)) => {
                    self.nameless.retain(|key| *key != peer);
                    self.sought.retain(|key| *key != peer);
                    if !self.complete && !self.is_held_up() {
                        self.finish()?;
                    }
                }
                Err(RecvTimeoutError::Timeout) if self.tunnel.is_over() => return Ok(()),
                Err(RecvTimeoutError::Timeout) if looked.elapsed() >= silence::LOOK => {
                    looked = Instant::now();
                    self.look_after_peers();
                    if marked.is_none_or(|marked| marked.elapsed() >= clock::STEP) && self.remember(false) {
                        marked = Some(Instant::now());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Writes down the time of the last handshake, if there was one.
    fn remember(&mut self, ended: bool) -> bool {
        let Some(mark) = &mut self.mark_of_time else { return false };
        let snapshot = self.tunnel.handle().snapshot().unwrap_or_default();
        let Some(last) = snapshot.peers.iter().filter_map(|peer| peer.last_handshake).max() else {
            return false;
        };
        mark.write(last, ended);
        true
    }

    /// Undoes everything, the latest first. Trouble with one thing does not keep the others from being undone.
    fn take_down(self) -> Result<(), String> {
        let Self { tunnel, config, mut netlink, index, complete, undo, .. } = self;
        let name = tunnel.name().to_owned();
        let run = |hooks: &[Hook]| {
            for hook in hooks.iter().filter(|_| complete) {
                if let Err(error) = hooks::run(hook, &name) {
                    log::warn!("{error}");
                }
            }
        };
        run(&config.interface.pre_down);
        drop(undo);
        // The link monitor has a descriptor too, so the end of the worker alone would not remove it yet.
        if netlink.link_at(index).is_ok_and(|link| link.is_some_and(|link| link.name == name)) {
            let _ = netlink.delete_link(index);
        }
        tunnel.handle().stop();
        let outcome = tunnel.wait();
        run(&config.interface.post_down);
        outcome
    }
}

/// Hands the addresses of names to the worker.
struct Teller {
    handle: Handle,
    wake: Sender<Wake>,
    mark: u32,
    keepalives: Vec<(PublicKey, Option<u16>)>,
}

impl Resolver for Teller {
    fn reachable(&self, address: SocketAddr) -> bool {
        let way = Netlink::open().and_then(|mut netlink| netlink.route_to(address.ip(), self.mark));
        way.is_ok_and(|way| way.is_some())
    }

    fn found(&self, name: &Name, address: SocketAddr) {
        let keepalive = self.keepalives.iter().find(|(peer, _)| *peer == name.peer);
        let peer = PeerUpdate {
            update_only: true,
            endpoint: Some(address),
            persistent_keepalive: keepalive.and_then(|(_, seconds)| *seconds),
            ..PeerUpdate::new(name.peer)
        };
        let update = DeviceUpdate { peers: vec![peer], ..DeviceUpdate::default() };
        // The worker, and then the main thread, may have ended meanwhile.
        let _ = self.handle.configure(update);
        let _ = self.wake.send(Wake::Found(name.peer));
    }
}

fn end_with_stdin(wake: Sender<Wake>) -> io::Result<()> {
    thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = wake.send(Wake::End);
    })?;
    Ok(())
}

fn tell_counters(handle: &Handle) {
    let mut out = io::stdout();
    for (name, value) in handle.counters().iter().flat_map(forestvpn_quantum::Counters::iter) {
        let _ = writeln!(out, "{name} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_the_interface_and_a_bare_name_means_the_usual_place() {
        let located = |text: &str| locate(Path::new(text));
        let path = |text: &str| located(text).unwrap().1.display().to_string();
        assert_eq!(located("some/where/wg0.conf").unwrap().0, "wg0");
        assert_eq!(path("some/where/wg0.conf"), "some/where/wg0.conf");
        assert_eq!(path("wg-1.conf"), "wg-1.conf");
        assert_eq!(path("wg0"), "/etc/wireguard/wg0.conf");
        for (bad, part) in [
            ("./wg0", "ends in .conf"),
            ("some/.conf", "it is empty"),
            ("a-name-of-17-byte.conf", "17 bytes"),
            ("/", "ends in .conf"),
        ] {
            let error = located(bad).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
