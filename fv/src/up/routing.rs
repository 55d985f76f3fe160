//! Routes for allowed IPs, and the policy rules that send everything through the tunnel except the tunnel's own
//! packets. The same scheme as wg-quick's, without its packet filter. Called by `up`.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;

use super::forward::Forward;
use super::undo::Undo;
use crate::config::Table;
use crate::netlink::{self, MAIN_TABLE, Netlink, Route, Rule};

/// Where wg-quick begins to look for a free table, which is then the mark too.
pub(crate) const FIRST_TABLE: u32 = 51820;

/// A default route among `nets` makes the tunnel's own packets need a mark, or they would go into the tunnel.
pub(crate) fn needs_mark(table: Table, nets: &[IpNet]) -> bool {
    table == Table::Auto && nets.iter().any(|net| net.prefix_len() == 0)
}

/// The first table from 51820 on that is empty for both families. Rules that an fv killed with -9 left behind
/// for it are removed: while its table is empty they belong to nobody.
pub(crate) fn free_table(netlink: &mut Netlink) -> netlink::Result<u32> {
    let mut used = Vec::new();
    for ipv6 in [false, true] {
        match netlink.routes(ipv6) {
            Ok(routes) => used.extend(routes.into_iter().map(|route| route.table)),
            Err(error) if error.unsupported() => {}
            Err(error) => return Err(error),
        }
    }
    let table = (FIRST_TABLE..).find(|table| !used.contains(table)).unwrap_or(FIRST_TABLE);
    for ipv6 in [false, true] {
        let rules = netlink.rules(ipv6).unwrap_or_default();
        let ours = rules.iter().filter(|rule| {
            rule.table == table && rule.not_mark == Some(table) || Forward::is_rule_for(rule, table)
        });
        for rule in ours {
            let partner =
                Rule { iif: rule.iif.clone(), ..exempt_local(ipv6, rule.priority.saturating_sub(1)) };
            for stale in [Some(rule), rules.iter().find(|rule| **rule == partner)].into_iter().flatten() {
                log::info!("removing the {stale}, left behind by a tunnel that was killed");
                netlink.delete_rule(stale)?;
            }
        }
    }
    Ok(table)
}

/// Makes routes for `nets` through interface `index`, the most specific first. `mark` is the mark of the
/// tunnel's own packets and the table for default routes; it is there when [`needs_mark`] says so.
pub(crate) fn add_routes(
    netlink: &mut Netlink,
    undo: &mut Undo,
    index: u32,
    table: Table,
    nets: &[IpNet],
    mark: Option<u32>,
) -> netlink::Result<()> {
    let number = match table {
        Table::Off => return Ok(()),
        Table::Auto => MAIN_TABLE,
        Table::Number(number) => number,
    };
    let mut nets = nets.to_vec();
    nets.sort_by_key(|net| (std::cmp::Reverse(net.prefix_len()), *net));
    nets.dedup();
    for net in nets {
        if let (0, Table::Auto, Some(mark)) = (net.prefix_len(), table, mark) {
            add_default(netlink, undo, Route::new(net, index, mark))?;
            continue;
        }
        // In the main table a route that covers this one already goes into the tunnel: the connected network
        // of our own address, for example.
        if number == MAIN_TABLE && covered(netlink, index, net)? {
            continue;
        }
        add_route(netlink, &Route::new(net, index, number))?;
    }
    Ok(())
}

fn covered(netlink: &mut Netlink, index: u32, net: IpNet) -> netlink::Result<bool> {
    let routes = netlink.routes(net.addr().is_ipv6())?;
    Ok(routes.iter().any(|r| r.index == index && r.table == MAIN_TABLE && r.net.contains(&net)))
}

/// A route that is there already is what was wanted, if it goes through the tunnel.
pub(crate) fn add_route(netlink: &mut Netlink, route: &Route) -> netlink::Result<()> {
    let Err(error) = netlink.add_route(route) else { return Ok(()) };
    if error.exists() {
        let routes = netlink.routes(route.net.addr().is_ipv6())?;
        if routes.iter().any(|r| (r.net, r.index, r.table) == (route.net, route.index, route.table)) {
            return Ok(());
        }
    }
    Err(error)
}

/// Everything without the mark looks into the tunnel's table, but only after the main table's own routes, its
/// default route left out. The routes themselves go away with the interface.
fn add_default(netlink: &mut Netlink, undo: &mut Undo, route: Route) -> netlink::Result<()> {
    let ipv6 = route.net.addr().is_ipv6();
    add_route(netlink, &route)?;
    // Just before the first rule that is not the kernel's own: what `ip rule add` does without a priority.
    let rules = netlink.rules(ipv6)?;
    let first = rules.iter().map(|rule| rule.priority).filter(|priority| *priority > 0).min();
    let priority = first.unwrap_or(32766).saturating_sub(1);
    let through = Rule {
        ipv6,
        priority,
        iif: None,
        not_mark: Some(route.table),
        table: route.table,
        suppress_prefix: None,
    };
    for rule in [through, exempt_local(ipv6, priority.saturating_sub(1))] {
        netlink.add_rule(&rule)?;
        undo.rule(rule);
    }
    if !ipv6 {
        trust_marks(undo);
    }
    Ok(())
}

/// What the main table knows better than "default" stays outside of the tunnel.
pub(crate) const fn exempt_local(ipv6: bool, priority: u32) -> Rule {
    Rule { ipv6, priority, iif: None, not_mark: None, table: MAIN_TABLE, suppress_prefix: Some(0) }
}

/// Tells the kernel to honour marks when it checks where a packet came from (as wg-quick does).
fn trust_marks(undo: &mut Undo) {
    const PATH: &str = "/proc/sys/net/ipv4/conf/all/src_valid_mark";
    if let Err(error) = undo.sysctl(Path::new(PATH), "1") {
        log::info!("net.ipv4.conf.all.src_valid_mark stays as it is: {error}");
    }
}

/// Strict reverse path filtering on an interface through which the tunnel's own packets come in would drop
/// them: the way back to their sender now leads into the tunnel, and only a packet filter could mark them.
/// It is turned from strict to loose while the tunnel is up, and said.
pub(crate) fn loosen_reverse_path(undo: &mut Undo, uplink: &str) {
    let value = |interface: &str| -> u8 {
        let path = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    // The kernel takes the larger of both; 1 is strict, 2 is loose.
    if value("all").max(value(uplink)) != 1 {
        return;
    }
    let path = format!("/proc/sys/net/ipv4/conf/{uplink}/rp_filter");
    match undo.sysctl(Path::new(&path), "2") {
        Ok(()) => log::info!(
            "reverse path filter of {uplink} set from strict to loose while the tunnel is up: strict would drop \
             the tunnel's own packets"
        ),
        Err(error) => log::warn!(
            "the reverse path filter of {uplink} is strict and cannot be changed ({error}); it will drop the \
             tunnel's packets. Set net.ipv4.conf.{uplink}.rp_filter=2"
        ),
    }
}

/// Does so for the way to each IPv4 endpoint, and for the default route, where roaming peers come in.
pub(crate) fn loosen_reverse_paths(netlink: &mut Netlink, undo: &mut Undo, endpoints: &[IpAddr], mark: u32) {
    let mut uplinks: Vec<u32> = ways(netlink, endpoints, mark).iter().map(|way| way.index).collect();
    uplinks.extend(default_route(netlink).map(|route| route.index));
    uplinks.sort_unstable();
    uplinks.dedup();
    for index in uplinks {
        if let Ok(Some(link)) = netlink.link_at(index) {
            loosen_reverse_path(undo, &link.name);
        }
    }
}

fn ways(netlink: &mut Netlink, endpoints: &[IpAddr], mark: u32) -> Vec<Route> {
    endpoints.iter().filter_map(|to| netlink.route_to(*to, mark).ok().flatten()).collect()
}

pub(crate) fn default_route(netlink: &mut Netlink) -> Option<Route> {
    let routes = netlink.routes(false).unwrap_or_default();
    routes.into_iter().find(|route| route.net.prefix_len() == 0 && route.table == MAIN_TABLE)
}

/// IPv6 is switched off, for this interface or for the whole host.
pub(crate) fn ipv6_off(interface: &str) -> bool {
    match fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6")) {
        Ok(text) => text.trim() != "0",
        // Without IPv6 in the kernel there is no such file; without /proc nobody can tell.
        Err(_) => Path::new("/proc/sys/net/ipv4").exists(),
    }
}

/// The MTU that fits inside of the way to the endpoints, as wg-quick reckons it: the largest that one of them
/// allows, else that of the default route, else 1500; less 80 for IPv6, UDP and our own header.
pub(crate) fn fitting_mtu(netlink: &mut Netlink, endpoints: &[IpAddr], mark: u32) -> u16 {
    let mut ways = ways(netlink, endpoints, mark);
    if ways.is_empty() {
        ways.extend(default_route(netlink));
    }
    let of_way =
        |way: &Route| way.mtu.or_else(|| netlink.link_at(way.index).ok().flatten().map(|link| link.mtu));
    let outer = ways.iter().filter_map(of_way).max().unwrap_or(1500);
    // Loopback's 65536 is more than a tunnel packet can be.
    u16::try_from(outer.saturating_sub(80)).unwrap_or(u16::MAX).clamp(1280, 65455)
}

#[cfg(test)]
mod tests;
