//! The first door: a `Tunn`, as programs written for boringtun use it.
//!
//! Two tunnels in one process talk over two loopback sockets. The first sends five packets, the second answers
//! each; then both stay quiet and let the timers run.
//!
//! `cargo run -p forestvpn-quantum --example embed_tunn`

use std::error::Error;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use forestvpn_quantum::noise::{Tunn, TunnResult};
use forestvpn_quantum::x25519::{PublicKey, StaticSecret};
use rand_core::OsRng;

/// Room for any datagram, and for what comes out of it.
const BUFFER: usize = 65_535;

/// One end: a tunnel, its socket and where the other end is.
struct End {
    name: &'static str,
    tunn: Tunn,
    socket: UdpSocket,
    peer: SocketAddr,
}

impl End {
    /// Seals a packet for the peer. Without a session the tunnel keeps the packet and gives an initiation.
    fn send(&mut self, packet: &[u8]) -> Result<(), Box<dyn Error>> {
        // At least 148 bytes, and 32 more than the packet; 15 more let it be padded in full.
        let mut buf = vec![0; BUFFER];
        let result = self.tunn.encapsulate(packet, &mut buf);
        self.act(result).map(|_| ())
    }

    /// Takes a datagram if one is there; gives the IP packet that was in it.
    fn receive(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        let mut datagram = vec![0; BUFFER];
        let (len, from) = match self.socket.recv_from(&mut datagram) {
            Ok(got) => got,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let mut buf = vec![0; BUFFER];
        let result = self.tunn.decapsulate(Some(from.ip()), &datagram[..len], &mut buf);
        let again = matches!(result, TunnResult::WriteToNetwork(_));
        let packet = self.act(result)?;
        if again {
            // After an answer for the network more may be ready: packets that waited for the session.
            loop {
                let mut buf = vec![0; BUFFER];
                let result = self.tunn.decapsulate(None, &[], &mut buf);
                if matches!(result, TunnResult::Done) {
                    break;
                }
                self.act(result)?;
            }
        }
        Ok(packet)
    }

    /// Lets the tunnel do what is due: retries, keepalives, new handshakes.
    fn tick(&mut self) -> Result<(), Box<dyn Error>> {
        let mut buf = vec![0; BUFFER];
        let result = self.tunn.update_timers(&mut buf);
        self.act(result).map(|_| ())
    }

    fn act(&self, result: TunnResult<'_>) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        match result {
            TunnResult::Done => {}
            TunnResult::WriteToNetwork(datagram) => {
                println!("{}: {:>4} bytes to {}", self.name, datagram.len(), self.peer);
                self.socket.send_to(datagram, self.peer)?;
            }
            TunnResult::WriteToTunnelV4(packet, from) => {
                println!("{}: a packet of {} bytes from {from} came out", self.name, packet.len());
                return Ok(Some(packet.to_vec()));
            }
            TunnResult::WriteToTunnelV6(packet, from) => {
                println!("{}: a packet of {} bytes from {from} came out", self.name, packet.len());
                return Ok(Some(packet.to_vec()));
            }
            // A datagram that cannot be used is no reason to stop: anybody can send us one.
            TunnResult::Err(e) => println!("{}: {e}", self.name),
        }
        Ok(None)
    }
}

/// An IPv4 packet without a payload that means anything.
fn packet(from: [u8; 4], to: [u8; 4], len: u8) -> Vec<u8> {
    let mut packet = vec![0; usize::from(len)];
    packet[0] = 0x45;
    packet[3] = len;
    packet[12..16].copy_from_slice(&from);
    packet[16..20].copy_from_slice(&to);
    packet
}

fn main() -> Result<(), Box<dyn Error>> {
    let secrets = [StaticSecret::random_from_rng(OsRng), StaticSecret::random_from_rng(OsRng)];
    let publics = [PublicKey::from(&secrets[0]), PublicKey::from(&secrets[1])];
    let sockets = [UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?];
    let addresses = [sockets[0].local_addr()?, sockets[1].local_addr()?];
    let [a_secret, b_secret] = secrets;
    let [a_socket, b_socket] = sockets;
    for socket in [&a_socket, &b_socket] {
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    }
    let mut a = End {
        name: "a",
        tunn: Tunn::new(a_secret, publics[1], None, Some(1), 1, None),
        socket: a_socket,
        peer: addresses[1],
    };
    let mut b = End {
        name: "b",
        tunn: Tunn::new(b_secret, publics[0], None, None, 2, None),
        socket: b_socket,
        peer: addresses[0],
    };

    for len in 60..65 {
        a.send(&packet([10, 0, 0, 1], [10, 0, 0, 2], len))?;
    }
    let mut answers = 0;
    for _ in 0..150 {
        if let Some(asked) = b.receive()? {
            b.send(&packet([10, 0, 0, 2], [10, 0, 0, 1], asked[3]))?;
        }
        answers += usize::from(a.receive()?.is_some());
        a.tick()?;
        b.tick()?;
    }
    let (_, sent, received, ..) = a.tunn.stats();
    println!("{answers} answers; {sent} bytes of packets went out and {received} came in");
    if answers == 5 { Ok(()) } else { Err("not every packet was answered".into()) }
}
