//! Interfaces: look up, MTU, up and down, veth pairs.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};

use super::{Netlink, Result};

/// What is worth knowing about an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// The kernel's number for it, in this network namespace.
    pub(crate) index: u32,
    /// Its name now.
    pub(crate) name: String,
    /// In bytes.
    pub(crate) mtu: u32,
    /// Switched on by the administrator (IFF_UP).
    pub(crate) up: bool,
}

impl Link {
    fn read(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewLink(message) = message else { return None };
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mtu: 0,
            up: message.header.flags.contains(LinkFlags::Up),
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                _ => {}
            }
        }
        Some(link)
    }
}

impl Netlink {
    /// The interface called `name`; `None` when there is none.
    pub(crate) fn link(&mut self, name: &str) -> Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.one_link(format_args!("look up interface {name}"), message)
    }

    /// The interface with number `index`; `None` when there is none.
    pub(crate) fn link_at(&mut self, index: u32) -> Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.one_link(format_args!("look up interface number {index}"), message)
    }

    fn one_link(&mut self, what: impl fmt::Display, message: LinkMessage) -> Result<Option<Link>> {
        match self.ask(what, RouteNetlinkMessage::GetLink(message)) {
            Ok(answers) => Ok(answers.into_iter().find_map(Link::read)),
            Err(error) if error.missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the MTU of interface `index` to `mtu` bytes.
    pub(crate) fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<()> {
        let what = format!("set the MTU to {mtu}");
        self.set_link(what, index, Some(LinkAttribute::Mtu(mtu)), None)
    }

    /// Switches interface `index` on or off.
    pub(crate) fn set_up(&mut self, index: u32, up: bool) -> Result<()> {
        let what = if up { "bring the interface up" } else { "take the interface down" };
        self.set_link(what, index, None, Some(up))
    }

    fn set_link(
        &mut self,
        what: impl fmt::Display,
        index: u32,
        attribute: Option<LinkAttribute>,
        up: Option<bool>,
    ) -> Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes.extend(attribute);
        if let Some(up) = up {
            message.header.change_mask = LinkFlags::Up;
            message.header.flags.set(LinkFlags::Up, up);
        }
        self.change(what, RouteNetlinkMessage::SetLink(message), 0)
    }

    /// For tests: moves interface `index` into the network namespace `to`.
    #[cfg(test)]
    pub(crate) fn move_link(&mut self, index: u32, to: BorrowedFd<'_>) -> Result<()> {
        let attribute = LinkAttribute::NetNsFd(to.as_raw_fd());
        self.set_link("move the interface to another network namespace", index, Some(attribute), None)
    }

    /// Removes interface `index`.
    pub(crate) fn delete_link(&mut self, index: u32) -> Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.change("remove the interface", RouteNetlinkMessage::DelLink(message), 0)
    }

    /// Creates a virtual cable: `name` here, its other end `peer` in the network namespace `peer_ns`.
    pub(crate) fn add_veth(&mut self, name: &str, peer: &str, peer_ns: BorrowedFd<'_>) -> Result<()> {
        let mut far = LinkMessage::default();
        far.attributes.push(LinkAttribute::IfName(peer.to_owned()));
        far.attributes.push(LinkAttribute::NetNsFd(peer_ns.as_raw_fd()));
        let mut near = LinkMessage::default();
        near.attributes.push(LinkAttribute::IfName(name.to_owned()));
        near.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
        ]));
        let what = format!("create the veth pair {name}, {peer}");
        self.change(what, RouteNetlinkMessage::NewLink(near), NLM_F_CREATE | NLM_F_EXCL)
    }
}
