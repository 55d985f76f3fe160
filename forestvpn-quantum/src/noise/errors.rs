//! Why a call on a [`Tunn`](super::Tunn) came to nothing.

use core::fmt;

use crate::event::Discard;

/// Upstream's errors under upstream's names. None of them changes the state of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireGuardError {
    /// `dst` is too short for what has to go into it.
    DestinationBufferTooSmall,
    /// A length contradicts the kind of message. Not used: [`InvalidPacket`](Self::InvalidPacket) says it.
    IncorrectPacketLength,
    /// A response although no handshake of ours is under way.
    UnexpectedPacket,
    /// A message of the wrong kind. Not used: [`InvalidPacket`](Self::InvalidPacket) says it.
    WrongPacketType,
    /// The receiver index belongs to none of our handshakes or sessions.
    WrongIndex,
    /// An initiation from somebody else's key, or a key with which no handshake is possible.
    WrongKey,
    /// Not used: timestamps are compared as they come (C-HS-3).
    InvalidTai64nTimestamp,
    /// An initiation that is not newer than one accepted before: a late or a replayed one.
    WrongTai64nTimestamp,
    /// mac1 is not for our public key.
    InvalidMac,
    /// The tag does not verify: forged, damaged, or meant for other keys.
    InvalidAeadTag,
    /// The counter is too old for the replay window, or beyond the last one allowed.
    InvalidCounter,
    /// The counter was seen before.
    DuplicateCounter,
    /// No WireGuard message, or no IP packet inside of one.
    InvalidPacket,
    /// There is no session, or it is too old, to send or to receive with.
    NoCurrentSession,
    /// Not used: nothing here waits for a lock.
    LockFailed,
    /// Nobody answered for 90 s, or the keys are wiped. The next packet to send begins anew.
    ConnectionExpired,
    /// Too many handshake messages, and this one does not prove its address or came too soon.
    UnderLoad,
}

impl From<Discard> for WireGuardError {
    fn from(why: Discard) -> Self {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the others belong to a device with many peers")]
        match why {
            Discard::BadMac1 => Self::InvalidMac,
            Discard::UnknownIndex => Self::WrongIndex,
            Discard::BadTag | Discard::BadCookie => Self::InvalidAeadTag,
            Discard::Replayed => Self::DuplicateCounter,
            Discard::KeyExpired => Self::NoCurrentSession,
            Discard::UnknownPeer | Discard::NoKey => Self::WrongKey,
            Discard::OldTimestamp => Self::WrongTai64nTimestamp,
            Discard::TooFrequent | Discard::UnderLoad => Self::UnderLoad,
            Discard::NoRoom => Self::DestinationBufferTooSmall,
            _ => Self::InvalidPacket,
        }
    }
}

impl fmt::Display for WireGuardError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DestinationBufferTooSmall => "the output buffer is too small",
            Self::IncorrectPacketLength => "the message has a wrong length",
            Self::UnexpectedPacket => "a response without a handshake",
            Self::WrongPacketType => "a message of the wrong kind",
            Self::WrongIndex => "the message is for an unknown session",
            Self::WrongKey => "the message is from another key than the peer's",
            Self::InvalidTai64nTimestamp => "the timestamp is invalid",
            Self::WrongTai64nTimestamp => "the initiation is not newer than the last one",
            Self::InvalidMac => "the message is not for our public key",
            Self::InvalidAeadTag => "the message does not verify",
            Self::InvalidCounter => "the packet is too late",
            Self::DuplicateCounter => "the packet came before",
            Self::InvalidPacket => "no valid message",
            Self::NoCurrentSession => "there is no session",
            Self::LockFailed => "a lock failed",
            Self::ConnectionExpired => "the peer does not answer",
            Self::UnderLoad => "too many handshakes",
        })
    }
}

impl core::error::Error for WireGuardError {}
