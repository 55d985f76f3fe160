//! Addresses, routes and policy rules.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, Result};

/// The table that `ip route` shows.
pub(crate) const MAIN_TABLE: u32 = RouteHeader::RT_TABLE_MAIN as u32;

/// A route through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Where to.
    pub(crate) net: IpNet,
    /// Through which interface; 0 in a listed route that has none (blackhole) or several.
    pub(crate) index: u32,
    /// In which table.
    pub(crate) table: u32,
    /// Smaller wins; `None` leaves it to the kernel (0 for IPv4, 1024 for IPv6).
    pub(crate) metric: Option<u32>,
    /// Next hop; `None` when everything is directly behind the interface.
    pub(crate) gateway: Option<IpAddr>,
    /// The MTU that is set on the route itself, in bytes. Only read, never written.
    pub(crate) mtu: Option<u32>,
}

impl Route {
    /// A route to `net` directly behind interface `index`.
    pub(crate) const fn new(net: IpNet, index: u32, table: u32) -> Self {
        Self { net, index, table, metric: None, gateway: None, mtu: None }
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = family(self.net.addr());
        message.header.destination_prefix_length = self.net.prefix_len();
        message.header.protocol = RouteProtocol::Boot;
        message.header.kind = RouteType::Unicast;
        message.header.scope = if self.gateway.is_none() && self.net.addr().is_ipv4() {
            RouteScope::Link
        } else {
            RouteScope::Universe
        };
        message.attributes.push(RouteAttribute::Table(self.table));
        message.attributes.push(RouteAttribute::Oif(self.index));
        if self.net.prefix_len() > 0 {
            message.attributes.push(RouteAttribute::Destination(self.net.network().into()));
        }
        message.attributes.extend(self.metric.map(RouteAttribute::Priority));
        message.attributes.extend(self.gateway.map(|gateway| RouteAttribute::Gateway(gateway.into())));
        message
    }

    fn read(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewRoute(message) = message else { return None };
        let zero = zero(message.header.address_family)?;
        let mut address = zero;
        let mut route = Self {
            table: message.header.table.into(),
            ..Self::new(IpNet::new(zero, 0).ok()?, 0, MAIN_TABLE)
        };
        for attribute in message.attributes {
            match attribute {
                RouteAttribute::Destination(to) => address = plain(&to)?,
                RouteAttribute::Gateway(gateway) => route.gateway = plain(&gateway),
                RouteAttribute::Oif(index) => route.index = index,
                RouteAttribute::Table(table) => route.table = table,
                RouteAttribute::Priority(metric) => route.metric = Some(metric),
                RouteAttribute::Metrics(metrics) => {
                    route.mtu = metrics.iter().find_map(|metric| match metric {
                        RouteMetric::Mtu(mtu) => Some(*mtu),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        route.net = IpNet::new(address, message.header.destination_prefix_length).ok()?;
        Some(route)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.net)?;
        if self.table == MAIN_TABLE { Ok(()) } else { write!(f, " in table {}", self.table) }
    }
}

/// A policy rule of the two kinds that wg-quick uses, or for what comes in by one interface; for IPv4 or for IPv6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// For IPv6 packets instead of IPv4 ones.
    pub(crate) ipv6: bool,
    /// Smaller is asked first; 0 belongs to the kernel's own rule.
    pub(crate) priority: u32,
    /// Only packets that come in by this interface.
    pub(crate) iif: Option<String>,
    /// Only packets that do not carry this mark.
    pub(crate) not_mark: Option<u32>,
    /// Look into this table...
    pub(crate) table: u32,
    /// ...but do not take a route whose prefix is this long or shorter (0: no default route).
    pub(crate) suppress_prefix: Option<u32>,
}

impl Rule {
    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = if self.ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        message.header.action = RuleAction::ToTable;
        message.attributes.push(RuleAttribute::Priority(self.priority));
        message.attributes.push(RuleAttribute::Table(self.table));
        if let Some(mark) = self.not_mark {
            message.header.flags |= RuleFlags::Invert;
            message.attributes.push(RuleAttribute::FwMark(mark));
            message.attributes.push(RuleAttribute::FwMask(u32::MAX));
        }
        message.attributes.extend(self.iif.clone().map(RuleAttribute::Iifname));
        message.attributes.extend(self.suppress_prefix.map(RuleAttribute::SuppressPrefixLen));
        message
    }

    fn read(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewRule(message) = message else { return None };
        let mut rule = Self {
            ipv6: message.header.family == AddressFamily::Inet6,
            priority: 0,
            iif: None,
            not_mark: None,
            table: message.header.table.into(),
            suppress_prefix: None,
        };
        for attribute in message.attributes {
            match attribute {
                RuleAttribute::Priority(priority) => rule.priority = priority,
                RuleAttribute::Table(table) => rule.table = table,
                RuleAttribute::Iifname(name) => rule.iif = Some(name),
                RuleAttribute::FwMark(mark) if message.header.flags.contains(RuleFlags::Invert) => {
                    rule.not_mark = Some(mark);
                }
                // The kernel says "none" with all bits set.
                RuleAttribute::SuppressPrefixLen(length) if length != u32::MAX => {
                    rule.suppress_prefix = Some(length);
                }
                _ => {}
            }
        }
        Some(rule)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.ipv6 { "IPv6 policy rule '" } else { "IPv4 policy rule '" })?;
        if let Some(interface) = &self.iif {
            write!(f, "iif {interface} ")?;
        }
        if let Some(mark) = self.not_mark {
            write!(f, "not fwmark {mark:#x} ")?;
        }
        write!(f, "table {}", self.table)?;
        if let Some(length) = self.suppress_prefix {
            write!(f, " suppress_prefixlength {length}")?;
        }
        f.write_str("'")
    }
}

impl Netlink {
    /// Gives interface `index` the address `net.addr()` with a connected network of `net.prefix_len()` bits.
    /// IPv6 addresses are usable at once: a tunnel has nobody to ask whether the address is taken.
    pub(crate) fn add_address(&mut self, index: u32, net: IpNet) -> Result<()> {
        let message = RouteNetlinkMessage::NewAddress(address(index, net));
        self.change(format!("add the address {net}"), message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// For tests: the addresses of interface `index`, IPv4 first.
    #[cfg(test)]
    pub(crate) fn addresses(&mut self, index: u32) -> Result<Vec<IpNet>> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = AddressMessage::default();
            message.header.family = family;
            let answers = self.list("list the addresses", RouteNetlinkMessage::GetAddress(message))?;
            found.extend(answers.into_iter().filter_map(|answer| {
                let RouteNetlinkMessage::NewAddress(answer) = answer else { return None };
                if answer.header.index != index {
                    return None;
                }
                // Both are there on point-to-point links, and then the local one is ours.
                let mut chosen = None;
                for attribute in answer.attributes {
                    match attribute {
                        AddressAttribute::Local(local) => chosen = Some(local),
                        AddressAttribute::Address(address) => chosen = chosen.or(Some(address)),
                        _ => {}
                    }
                }
                IpNet::new(chosen?, answer.header.prefix_len).ok()
            }));
        }
        Ok(found)
    }

    /// Adds a route.
    pub(crate) fn add_route(&mut self, route: &Route) -> Result<()> {
        let message = RouteNetlinkMessage::NewRoute(route.message());
        self.change(format!("add the route {route}"), message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The routes of one family in every table.
    pub(crate) fn routes(&mut self, ipv6: bool) -> Result<Vec<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = if ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let answers = self.list("list the routes", RouteNetlinkMessage::GetRoute(message))?;
        Ok(answers.into_iter().filter_map(Route::read).collect())
    }

    /// Which way a packet to `to` with the mark `mark` (0: none) would go now; `None` when there is no way.
    pub(crate) fn route_to(&mut self, to: IpAddr, mark: u32) -> Result<Option<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(to);
        message.header.destination_prefix_length = if to.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(to.into()));
        if mark != 0 {
            message.attributes.push(RouteAttribute::Mark(mark));
        }
        match self.ask(format!("find the route to {to}"), RouteNetlinkMessage::GetRoute(message)) {
            Ok(answers) => Ok(answers.into_iter().find_map(Route::read)),
            Err(error) if error.no_way() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds a policy rule.
    pub(crate) fn add_rule(&mut self, rule: &Rule) -> Result<()> {
        let message = RouteNetlinkMessage::NewRule(rule.message());
        self.change(format!("add the {rule}"), message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes a policy rule.
    pub(crate) fn delete_rule(&mut self, rule: &Rule) -> Result<()> {
        let message = RouteNetlinkMessage::DelRule(rule.message());
        self.change(format!("remove the {rule}"), message, 0)
    }

    /// The policy rules of one family, in the order in which they are asked.
    pub(crate) fn rules(&mut self, ipv6: bool) -> Result<Vec<Rule>> {
        let mut message = RuleMessage::default();
        message.header.family = if ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let answers = self.list("list the policy rules", RouteNetlinkMessage::GetRule(message))?;
        Ok(answers.into_iter().filter_map(Rule::read).collect())
    }
}

fn address(index: u32, net: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(net.addr());
    message.header.index = index;
    message.header.prefix_len = net.prefix_len();
    if net.addr().is_ipv6() {
        message.header.flags |= AddressHeaderFlags::Nodad;
    }
    message.attributes.push(AddressAttribute::Local(net.addr()));
    message.attributes.push(AddressAttribute::Address(net.addr()));
    message
}

const fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn zero(family: AddressFamily) -> Option<IpAddr> {
    match family {
        AddressFamily::Inet => Some(Ipv4Addr::UNSPECIFIED.into()),
        AddressFamily::Inet6 => Some(Ipv6Addr::UNSPECIFIED.into()),
        _ => None,
    }
}

fn plain(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}
