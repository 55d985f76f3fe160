//! Messages as upstream shows them: parsed, not yet authenticated.

use core::fmt;

use super::errors::WireGuardError;
use crate::wire::{self, COOKIE_REPLY, DATA_HEADER, DataHeader, INITIATION, Message, RESPONSE};

/// A message by kind; its type, reserved bytes and length fit together.
#[derive(Debug)]
pub enum Packet<'a> {
    /// 148 bytes that ask for a session.
    HandshakeInit(HandshakeInit<'a>),
    /// 92 bytes that grant one.
    HandshakeResponse(HandshakeResponse<'a>),
    /// 64 bytes that ask for proof of the sender's address.
    PacketCookieReply(PacketCookieReply<'a>),
    /// 32 bytes or more of a session.
    PacketData(PacketData<'a>),
}

/// An initiation.
pub struct HandshakeInit<'a> {
    pub(super) message: &'a [u8; INITIATION],
}

/// A response.
pub struct HandshakeResponse<'a> {
    /// The sender index of the initiation that it answers.
    pub receiver_idx: u32,
    pub(super) message: &'a [u8; RESPONSE],
}

/// A cookie reply.
pub struct PacketCookieReply<'a> {
    /// The sender index of the message that it answers.
    pub receiver_idx: u32,
    pub(super) message: &'a [u8; COOKIE_REPLY],
}

/// A data message.
pub struct PacketData<'a> {
    /// The session: `index << 8 | n` for the index that the [`Tunn`](super::Tunn) was made with.
    pub receiver_idx: u32,
    pub(super) counter: u64,
    pub(super) body: &'a [u8],
}

impl<'a> Packet<'a> {
    pub(super) fn parse(src: &'a [u8]) -> Result<Self, WireGuardError> {
        Ok(match wire::parse(src).ok_or(WireGuardError::InvalidPacket)? {
            Message::Initiation(message) => Self::HandshakeInit(HandshakeInit { message }),
            Message::Response(message) => {
                Self::HandshakeResponse(HandshakeResponse { receiver_idx: wire::u32_at(message, 8), message })
            }
            Message::CookieReply(message) => {
                Self::PacketCookieReply(PacketCookieReply { receiver_idx: wire::u32_at(message, 4), message })
            }
            Message::Data(DataHeader { receiver, counter }) => Self::PacketData(PacketData {
                receiver_idx: receiver,
                counter,
                body: src.get(DATA_HEADER..).unwrap_or_default(),
            }),
        })
    }
}

impl HandshakeInit<'_> {
    pub(super) fn sender_idx(&self) -> u32 {
        wire::u32_at(self.message, 4)
    }
}

impl fmt::Debug for HandshakeInit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeInit").field("sender_idx", &self.sender_idx()).finish_non_exhaustive()
    }
}

impl fmt::Debug for HandshakeResponse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeResponse")
            .field("sender_idx", &wire::u32_at(self.message, 4))
            .field("receiver_idx", &self.receiver_idx)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PacketCookieReply<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketCookieReply").field("receiver_idx", &self.receiver_idx).finish_non_exhaustive()
    }
}

impl fmt::Debug for PacketData<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketData")
            .field("receiver_idx", &self.receiver_idx)
            .field("counter", &self.counter)
            .field("len", &self.body.len())
            .finish()
    }
}
