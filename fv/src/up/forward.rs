//! `--route-from IFNAME`: what comes in by that interface is passed on through the tunnel, by `ip rule iif`. The way of
//! a router, and of a container on one: no mark, and so nothing of the tunnel's own can ever go into the tunnel, for it
//! does not come in by an interface. Called by `up`.

use std::path::Path;

use ipnet::IpNet;

use super::routing::{self, FIRST_TABLE};
use super::undo::Undo;
use crate::config::Table;
use crate::netlink::{MAIN_TABLE, Netlink, Route, Rule};

/// Where the rules are: before those of wg-quick and of the kernel.
const PRIORITY: u32 = 300;

/// How packets find into the tunnel.
#[derive(Debug)]
pub(crate) struct Forward {
    from: String,
    table: u32,
    ruled: bool,
}

impl Forward {
    /// For packets that come in by `from`; `auto` stands for the interface of the default route.
    ///
    /// # Errors
    /// One sentence that says what to do.
    pub(crate) fn new(netlink: &mut Netlink, from: &str, table: Table) -> Result<Self, String> {
        let text = |e: crate::netlink::Error| e.to_string();
        let link = if from == "auto" {
            let route = routing::default_route(netlink).ok_or(
                "route-from auto: there is no default route that would show the interface; give its name",
            )?;
            netlink.link_at(route.index).map_err(text)?
        } else {
            netlink.link(from).map_err(text)?
        };
        let link = link.ok_or_else(|| {
            format!(
                "route-from {}: there is no such interface; `ip link` lists them",
                crate::uapi::shown(from)
            )
        })?;
        let table = match table {
            Table::Auto => routing::free_table(netlink).map_err(text)?,
            Table::Number(number) => number,
            Table::Off => return Err("route-from needs a table: Table = off is in the way".into()),
        };
        Ok(Self { from: link.name, table, ruled: false })
    }

    /// Routes `nets` through interface `index`, called `tunnel`: for what is passed on all of them, for this host
    /// itself those that are no default route. What the main table knows better stays outside.
    ///
    /// # Errors
    /// What the kernel refuses, in words.
    pub(crate) fn add(
        &mut self,
        netlink: &mut Netlink,
        undo: &mut Undo,
        (index, tunnel): (u32, &str),
        nets: &[IpNet],
    ) -> Result<(), String> {
        let text = |e: crate::netlink::Error| e.to_string();
        for net in nets {
            routing::add_route(netlink, &Route::new(*net, index, self.table)).map_err(text)?;
        }
        // Half of the Internet is a default route in two parts.
        let small: Vec<_> = nets.iter().copied().filter(|net| net.prefix_len() > 1).collect();
        routing::add_routes(netlink, undo, index, Table::Number(MAIN_TABLE), &small, None).map_err(text)?;
        if std::mem::replace(&mut self.ruled, true) {
            return Ok(());
        }
        for ipv6 in [false, true] {
            if ipv6 && routing::ipv6_off(tunnel) {
                continue;
            }
            for rule in self.rules(ipv6) {
                netlink.add_rule(&rule).map_err(text)?;
                undo.rule(rule);
            }
            self.pass_on(undo, ipv6);
        }
        for interface in [tunnel, &self.from] {
            routing::loosen_reverse_path(undo, interface);
        }
        log::info!("what comes in by {} goes through table {} and the tunnel", self.from, self.table);
        Ok(())
    }

    fn rules(&self, ipv6: bool) -> [Rule; 2] {
        let iif = Some(self.from.clone());
        let through = Rule {
            ipv6,
            priority: PRIORITY,
            iif: iif.clone(),
            not_mark: None,
            table: self.table,
            suppress_prefix: None,
        };
        let exempt = Rule { iif, ..routing::exempt_local(ipv6, PRIORITY - 1) };
        [through, exempt]
    }

    /// Makes a router of this host.
    fn pass_on(&self, undo: &mut Undo, ipv6: bool) {
        let path = if ipv6 { "net/ipv6/conf/all/forwarding" } else { "net/ipv4/ip_forward" };
        if ipv6 {
            // A router would not listen to other routers any more, and lose its own default route.
            let accept = format!("/proc/sys/net/ipv6/conf/{}/accept_ra", self.from);
            if std::fs::read_to_string(&accept).is_ok_and(|value| value.trim() == "1") {
                let _ = undo.sysctl(Path::new(&accept), "2");
            }
        }
        if let Err(error) = undo.sysctl(&Path::new("/proc/sys").join(path), "1") {
            let name = path.replace('/', ".");
            log::warn!("cannot switch on {name}: {error}; nothing is passed on until it is 1");
        }
    }

    /// Rules of this kind for `table`.
    pub(crate) fn is_rule_for(rule: &Rule, table: u32) -> bool {
        table >= FIRST_TABLE && rule.table == table && rule.iif.is_some() && rule.priority == PRIORITY
    }
}
